"""Runs `octavo up` as users do, in a process of its own."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from tests.support.ports import free_port
from tests.support.repository import ROOT

FAKES = ROOT / "tests" / "fakes" / "processes"
COMMAND = (sys.executable, "-c", "from octavo.cli.main import main; main()")
# Loading quantizes models, on a machine that may be busy.
_TIMEOUT = 120.0
_POLL_S = 0.05


def environment(**extra: str) -> dict[str, str]:
    """This process's environment without its Octavo settings; with PYTHONPATH, so that no installation is needed."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_")}
    return clean | {"PYTHONPATH": str(ROOT), "COLUMNS": "200", "OCTAVO_HTTP_PORT": "0"} | extra


class Up:
    """One `octavo up`, with stand-ins for its processes unless real=True. Leaving the context kills all processes."""

    def __init__(
        self,
        directory: Path,
        *flags: str,
        runtime_dir: Path | None = None,
        port: int = 0,
        real: bool = False,
        metrics_port: int = 0,
        command: Sequence[str] = COMMAND,
        output_to: Path | None = None,
        **env: str,
    ):
        """command: the program that is `octavo`. output_to: a file for its output, as `octavo up > FILE`."""
        if not real:
            model = directory / "fake.gguf"
            model.touch()
            flags = (f"--model={model}", *flags)
        self.port = port or free_port()
        self.metrics_port = metrics_port
        self.runtime_dir = runtime_dir or directory / "runtime"
        self.lines: list[str] = []
        self._grown = threading.Condition()
        self._ended = False
        self._output_to = output_to
        with contextlib.ExitStack() as opened:
            output = opened.enter_context(output_to.open("w")) if output_to else subprocess.PIPE
            self.process = subprocess.Popen(
                [
                    *command,
                    "up",
                    f"--runtime-dir={self.runtime_dir}",
                    f"--port={self.port}",
                    f"--metrics-port={metrics_port}",
                    *flags,
                ],
                cwd=directory if real else FAKES,
                env=environment(**env),
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> "Up":
        return self

    def __exit__(self, *error: object) -> None:
        children = self.children()
        self.process.kill()
        self.process.wait()
        for each in children:
            if each.is_running():
                each.kill()
        psutil.wait_procs(children, timeout=_TIMEOUT)
        self._reader.join()
        if self.process.stdout is not None:
            self.process.stdout.close()

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, words: str, *, count: int = 1) -> str:
        """Waits until `count` lines contain the words; returns the first of them."""
        with self._grown:
            self._grown.wait_for(lambda: self._ended or len(self._find(words)) >= count, _TIMEOUT)
        found = self._find(words)
        assert len(found) >= count, f"{words!r} did not come {count} times:\n{self.output}"
        return found[0]

    def wait_until_serving(self, num_processes: int = 3) -> None:
        """Also waits for every stand-in to be up: before that, SIGTERM would simply kill it."""
        self.wait_for("serving; Ctrl-C to stop")
        self.wait_for(" max_num_seqs=", count=num_processes)

    def wait(self) -> int:
        """Waits for the end; returns the exit code."""
        code = self.process.wait(_TIMEOUT)
        self._reader.join(_TIMEOUT)
        return code

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def children(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def child(self, module: str) -> psutil.Process:
        """The first child that runs `python -m MODULE`."""
        return self.children_of(module)[0]

    def children_of(self, module: str) -> list[psutil.Process]:
        """All that run `python -m MODULE`."""
        return [each for each in self.children() if each.cmdline()[1:3] == ["-m", module]]

    def _find(self, words: str) -> list[str]:
        return [line for line in self.lines if words in line]

    def _read(self) -> None:
        for line in self._lines():
            with self._grown:
                self.lines.append(line.rstrip("\n"))
                self._grown.notify_all()
        with self._grown:
            self._ended = True
            self._grown.notify_all()

    def _lines(self) -> Iterator[str]:
        """Yields lines of output as they come, until the process ends."""
        if self._output_to is None:
            assert self.process.stdout is not None
            yield from self.process.stdout
            return
        with self._output_to.open(errors="replace") as file:
            rest = ""
            while True:
                # Asked first: what it wrote before its end is then read, too.
                has_ended = self.process.poll() is not None
                *whole, rest = (rest + file.read()).split("\n")
                yield from whole
                if has_ended:
                    return
                time.sleep(_POLL_S)
