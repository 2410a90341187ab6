"""Kernels of two states of the sources in one process, so that their times can be compared in turn.

`prepare.sh` puts the kernels of an earlier commit into .first_run/before. A question asks for both states by name, and
knows neither's code: whatever a change did to a kernel, its public function is called the same way.
"""

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from benchmarks.gpu.report import Missing

BEFORE = Path(os.environ.get("PREPARED", ".first_run"), "before")
STATES = ("before", "now")

# Modules of the earlier state that are loaded.
_earlier: dict[str, ModuleType] = {}

Import = Callable[[str], ModuleType]


@contextmanager
def state(name: str, folder: Path = BEFORE) -> Iterator[Import]:
    """Yields what imports a module of kernels from that state of the sources. Calls that may import more belong into
    the context, too. folder: the earlier state's. Raises Missing if the state, or the module in it, is not there."""
    if name == "now":
        yield importlib.import_module
        return
    if not (folder / "kernels").is_dir():
        raise Missing(f"{folder}/kernels: fill it with benchmarks/gpu/prepare.sh")
    now = _taken()
    sys.modules.update(_earlier)
    sys.path.insert(0, str(folder.resolve()))
    importlib.invalidate_caches()
    try:
        yield _import
    finally:
        sys.path.remove(str(folder.resolve()))
        _earlier.update(_taken())
        sys.modules.update(now)


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise Missing(f"the earlier state has no {error.name}") from error


def _taken() -> dict[str, ModuleType]:
    """Takes the modules of kernels out of sys.modules."""
    names = [name for name in sys.modules if name == "kernels" or name.startswith("kernels.")]
    return {name: sys.modules.pop(name) for name in names}
