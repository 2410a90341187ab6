"""Deliberate faults in kernels and in how workers call them: each must make a test fail."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.support.repository import ROOT

_SERVER = Path(__file__).with_name("fault_server.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    # What is wrong, in a few words: "mask of the last tile is missing".
    name: str
    # The file to change, relative to the repository's root, and a text that occurs in it exactly once.
    path: str
    old: str
    new: str
    # The test that has to fail, as pytest names it: "tests/kernels/moe/test_routing_triton.py::test_y[case]".
    test: str


def all_faults() -> list[Fault]:
    """The faults that tests/kernels/faults/*.py list."""
    faults: list[Fault] = []
    for path in sorted((ROOT / "tests/kernels/faults").glob("*.py")):
        spec = importlib.util.spec_from_file_location(f"faults_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        faults += module.FAULTS
    return faults


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRun:
    # The exit code of pytest.
    exit_code: int
    output: str


class FaultServer:
    """Runs the tests of faults one after the other, each in a fork that need not import torch and Triton: these
    imports would take most of the time."""

    def __init__(self) -> None:
        environment = {
            **os.environ,
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_SERVER)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, fault: Fault, directory: Path) -> FaultRun:
        """Runs the fault's test on a copy of kernels, worker and tests in directory."""
        for name in ("kernels", "worker", "tests"):
            shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", directory)
        source = directory / fault.path
        text = source.read_text()
        assert text.count(fault.old) == 1, f"{fault.path} has {text.count(fault.old)} of {fault.old!r}"
        source.write_text(text.replace(fault.old, fault.new))
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"directory": str(directory), "test": fault.test}), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, "the server of faults has ended"
        return FaultRun(exit_code=json.loads(answer)["code"], output=(directory / "output.txt").read_text())

    def close(self) -> None:
        """Closes the server's input, which ends it, and waits for that."""
        self._process.communicate()


class FaultRuns:
    """Runs faults in the background, two at a time, from construction on."""

    def __init__(self, faults: Sequence[Fault], make_directory: Callable[[], Path]) -> None:
        self._servers: list[FaultServer] = []
        self._own = threading.local()
        self._executor = ThreadPoolExecutor(2, initializer=self._start_server)
        self.results: dict[Fault, Future[FaultRun]] = {
            fault: self._executor.submit(self._run, fault, make_directory()) for fault in faults
        }

    def close(self) -> None:
        """Cancels the runs that have not begun."""
        self._executor.shutdown(cancel_futures=True)
        for server in self._servers:
            server.close()

    def _start_server(self) -> None:
        self._own.server = FaultServer()
        self._servers.append(self._own.server)

    def _run(self, fault: Fault, directory: Path) -> FaultRun:
        return self._own.server.run(fault, directory)
