"""Cores with deliberate bugs: one place in the source of a scheduler module is replaced and compiled in memory."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

from scheduler.core.core import Core

# Modules that are not imported anew: their values pass between the tests and the core, so the classes must be the same.
_SHARED = {"scheduler.core.messages"}


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    # The mistake, or what it leads to.
    why: str
    # A module of the package scheduler; `old` occurs in it exactly once.
    module: str
    old: str
    new: str
    # Settings under which walks find the bug.
    focus: Mapping[str, object]

    def source(self) -> str:
        """The module's source with the bug. Raises AssertionError unless the text to replace occurs exactly once."""
        spec = importlib.util.find_spec(f"scheduler.{self.module}")
        assert spec is not None
        assert isinstance(spec.loader, importlib.abc.InspectLoader)
        source = spec.loader.get_source(spec.name)
        assert source is not None
        assert source.count(self.old) == 1, (
            f"{self.name}: {self.old!r} is in {spec.name} {source.count(self.old)} times"
        )
        return source.replace(self.old, self.new)


class _Loader(importlib.abc.InspectLoader):
    def __init__(self, source: str) -> None:
        self._source = source

    def get_source(self, fullname: str) -> str:
        return self._source


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the mutated module and no other."""

    def __init__(self, name: str, source: str) -> None:
        self._name, self._source = name, source

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        return importlib.util.spec_from_loader(fullname, _Loader(self._source))


@contextmanager
def _fresh_modules() -> Iterator[None]:
    """Makes imports of scheduler modules load new copies; restores the old modules afterwards."""
    ours = {name: module for name, module in sys.modules.items() if name.startswith("scheduler.")}
    for name in ours.keys() - _SHARED:
        del sys.modules[name]
    package = sys.modules["scheduler"]
    attributes = dict(vars(package))
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.startswith("scheduler.")]:
            del sys.modules[name]
        sys.modules.update(ours)
        vars(package).clear()
        vars(package).update(attributes)


def mutated_core(mutant: Mutant) -> type[Core]:
    """The core with the mutant's bug. The regular core stays as it is."""
    finder = _Finder(f"scheduler.{mutant.module}", mutant.source())
    with _fresh_modules():
        sys.meta_path.insert(0, finder)
        try:
            return importlib.import_module("scheduler.core.core").Core
        finally:
            sys.meta_path.remove(finder)
