"""`octavo up` whose own output nothing reads (Ctrl-S, a dead ssh) still starts again what dies."""

import os
import signal
import subprocess
import time
from pathlib import Path

from tests.support.ports import free_port
from tests.support.repository import ROOT
from tests.support.up import COMMAND, environment

# Found first by `python -m worker` in its folder. A pipe holds 64 KiB.
WORKER = """
import os, signal
for number in range(1000):
    print(f"line {number}: " + "x" * 100)
with open("journal", "a") as journal:
    print(os.getpid(), file=journal)
signal.pause()
"""
TIMEOUT = 30.0


def pids(journal: Path, count: int) -> list[int]:
    """Waits until so many workers have printed everything."""
    deadline = time.monotonic() + TIMEOUT
    while not journal.exists() or journal.read_text().count("\n") < count:
        assert time.monotonic() < deadline, f"no worker {count}"
        time.sleep(0.02)
    return [int(line) for line in journal.read_text().split()]


def test_it_starts_a_dead_worker_again(tmp_path: Path) -> None:
    """Before: once its pipe was full, a worker that died was not started again."""
    (tmp_path / "worker.py").write_text(WORKER)
    for kind in ("router", "scheduler"):
        (tmp_path / f"{kind}.py").write_text("import signal\nsignal.pause()\n")
    model = tmp_path / "fake.gguf"
    model.touch()
    command = [
        *COMMAND,
        "up",
        f"--model={model}",
        f"--runtime-dir={tmp_path / 'runtime'}",
        f"--port={free_port()}",
        "--metrics-port=0",
    ]
    reading, writing = os.pipe()
    with subprocess.Popen(command, cwd=tmp_path, env=environment(PYTHONPATH=str(ROOT)), stdout=writing) as up:
        os.close(writing)
        try:
            [first] = pids(tmp_path / "journal", 1)
            os.kill(first, signal.SIGKILL)
            assert pids(tmp_path / "journal", 2)[0] == first
            # A reader that is gone for good changes nothing.
            os.close(reading)
            os.kill(pids(tmp_path / "journal", 2)[1], signal.SIGKILL)
            pids(tmp_path / "journal", 3)
        finally:
            up.kill()
