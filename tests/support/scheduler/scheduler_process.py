"""Runs `python -m scheduler` as a process."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator

from configs.options import Options
from tests.support.repository import ROOT
from tests.support.scheduler.scheduling import TIMEOUT
from tests.support.up import environment


class Process:
    """A scheduler process with the options of a test."""

    def __init__(self, options: Options, *flags: str) -> None:
        changed = options.model_dump(exclude_defaults=True)
        options_given = [f"--{name}={_text(value)}" for name, value in changed.items()]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "scheduler", *options_given, *flags],
            cwd=ROOT,
            env=environment(),
            text=True,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.address = options.scheduler_address(0)

    def end(self) -> tuple[int, str]:
        """Waits for the process to end; returns its exit code and output."""
        out, err = self.process.communicate(timeout=TIMEOUT)
        return self.process.returncode, out + err

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


@contextlib.contextmanager
def scheduler_process(options: Options, *flags: str) -> Iterator[Process]:
    scheduler = Process(options, *flags)
    try:
        yield scheduler
    finally:
        if scheduler.process.poll() is None:
            scheduler.process.kill()
        with scheduler.process:
            pass  # closes its pipes
