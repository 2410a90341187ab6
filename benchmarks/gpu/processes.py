"""Runs GPU benchmarks one after the other, each in a process of its own, which writes its rows to a file as it goes.

A CUDA error makes all later calls of its process fail, and a capture that fails can leave torch's random numbers in
capture mode: on 2026-11-26 one call that could not be captured took six ops with it. Here an op that fails, dies or
hangs leaves its rows so far, and the others measure as if it had not been there.

    python -m benchmarks.gpu.processes benchmarks.gpu.ops.rope --json FILE [--toy] [--seconds 60]

is one such process: it runs `run(report, toy=...)` of the module. The next process starts before it is needed, so that
its imports take no time of the GPU; it begins when a line with its seconds arrives on stdin (`--seconds -`).
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

Row = dict[str, Any]

# A process that has not ended so many seconds after its time gets killed: a part does not ask for the time between two
# launches, and a GPU that hangs never answers.
_GRACE_S = 30.0


class Measuring:
    """One process, which has started and waits to be told to begin."""

    def __init__(self, module: str, folder: Path, *, toy: bool) -> None:
        self.name = module.rpartition(".")[2]
        self._file = folder / f"{self.name}.json"
        command = [sys.executable, "-m", "benchmarks.gpu.processes", module, "--json", str(self._file), "--seconds=-"]
        self._process = subprocess.Popen([*command, *(["--toy"] if toy else [])], stdin=subprocess.PIPE, text=True)

    def result(self, seconds: float) -> Mapping[str, Any]:
        """Lets it run for so many seconds and waits for its end. Returns what it wrote last, with a row more if it did
        not end by itself."""
        failure = ""
        try:
            self._process.communicate(f"{seconds}\n", timeout=seconds + _GRACE_S)
        except subprocess.TimeoutExpired:
            self.stop()
            failure = f"killed {_GRACE_S:.0f} s after its time of {seconds:.0f} s"
        except BrokenPipeError:
            self._process.wait()
        result: dict[str, Any] = json.loads(self._file.read_text()) if self._file.exists() else {"rows": []}
        code = self._process.returncode
        if not failure and (code not in (0, 1) or not self._file.exists()):
            failure = f"the process ended with exit code {code}" if code >= 0 else f"the process died of signal {-code}"
        if failure:
            result["rows"].append({"op": self.name, "case": "", "failed": failure})
        return result

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


def results(modules: Sequence[str], seconds_of: Callable[[int], float], *, toy: bool) -> Iterator[Mapping[str, Any]]:
    """Yields what each module's process wrote, in order. seconds_of: asked for the time of modules[i] when its turn
    comes."""
    with TemporaryDirectory() as folder:
        waiting = [Measuring(modules[0], Path(folder), toy=toy)]
        try:
            for index in range(len(modules)):
                if index + 1 < len(modules):
                    waiting.append(Measuring(modules[index + 1], Path(folder), toy=toy))
                yield waiting.pop(0).result(seconds_of(index))
        finally:
            for process in waiting:
                process.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description="One GPU benchmark, in this process.")
    parser.add_argument("module", help="a module with run(report, toy=...)")
    parser.add_argument("--json", type=Path, required=True, help="file for its rows, written after each part")
    parser.add_argument("--seconds", default="60", help="time that it has; -: told on stdin")
    parser.add_argument("--toy", action="store_true", help="toy sizes in Triton's interpreter, checks only")
    arguments = parser.parse_args()
    if arguments.toy:
        # Before Triton is imported: the import decides how its own functions run.
        os.environ["TRITON_INTERPRET"] = "1"

    from benchmarks.gpu.report import Report

    name = arguments.module.rpartition(".")[2]

    def save(report: Report) -> None:
        # Replaced whole, because a process may be killed while it writes.
        new = arguments.json.with_suffix(".new")
        new.write_text(json.dumps(report.as_json(), indent=1) + "\n")
        new.replace(arguments.json)

    report = Report(
        toy=arguments.toy,
        device="cpu" if arguments.toy else "cuda",
        deadline=0.0,
        save=save,
        folder=arguments.json.absolute().parent,
    )

    def run() -> None:
        importlib.import_module(arguments.module).run(report, toy=arguments.toy)

    if arguments.seconds == "-":
        report.attempt(name, "", lambda: importlib.import_module(arguments.module))
        seconds = float(sys.stdin.readline())
    else:
        seconds = float(arguments.seconds)
    report.deadline = time.monotonic() + seconds
    if not report.failed:
        report.attempt(name, "", run)
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
