"""runtime.telemetry.log_writer: logging goes on while nothing reads stderr. Real processes, real pipes."""

import os
import re
import subprocess
import sys
import time

import pytest

from tests.support.repository import ROOT

NUM_LINES = 10_000
# A pipe holds 64 KiB, a few hundred lines.
LOGS_UNREAD = f"""
import logging, sys
from prometheus_client import CollectorRegistry, generate_latest
from runtime.telemetry.logs import configure_logging
from runtime.telemetry.metrics import count_dropped_records

configure_logging("router", "info", "text")
registry = CollectorRegistry()
count_dropped_records(registry)
for number in range({NUM_LINES}):
    logging.getLogger("octavo.router").info("line %d %s", number, "x" * 1000)
print(registry.get_sample_value("octavo_log_records_dropped_total"), flush=True)
sys.stdin.readline()
logging.getLogger("octavo.router").info("line {NUM_LINES}")
"""
DIES = """
import logging, threading
from runtime.telemetry.logs import configure_logging

configure_logging("router", "info", "text")
for number in range(1000):
    logging.getLogger("octavo.router").info("line %d", number)
thread = threading.Thread(target=lambda: 1 / 0, name="divider")
thread.start()
thread.join()
raise KeyError("lost")
"""
ENDS_UNREAD = """
import logging, os
from runtime.telemetry.logs import configure_logging

configure_logging("router", "info", "text")
for number in range(1000):
    logging.getLogger("octavo.router").info("line %d %s", number, "x" * 1000)
"""
FORKS = """
import logging, os
from runtime.telemetry.logs import configure_logging, flush_logs

configure_logging("router", "info", "text")
log = logging.getLogger("octavo.router")
for number in range(1000):
    log.info("parent %d", number)
child = os.fork()
log.info("child" if child == 0 else "still the parent")
if child == 0:
    assert flush_logs()
    os._exit(0)
os.waitpid(child, 0)
"""


def start(script: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(script: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


def test_a_process_goes_on_while_nobody_reads_its_log() -> None:
    with start(LOGS_UNREAD) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            os.set_blocking(process.stdout.fileno(), False)
            deadline = time.monotonic() + 20
            while not (said := process.stdout.readline()):
                assert time.monotonic() < deadline, "the process stands still"
                time.sleep(0.01)
            num_dropped = int(float(said))
            assert 0 < num_dropped < NUM_LINES
            process.stdin.write("\n")
            process.stdin.flush()
            lines = process.stderr.read().splitlines()
        finally:
            process.kill()
    numbers = [int(number) for number in re.findall(r" line (\d+) ", "\n".join(lines))]
    # All that was kept comes in order, then how much is missing, then the line after the gap.
    assert numbers == [*range(NUM_LINES - num_dropped), NUM_LINES]
    assert f"{num_dropped} log records were dropped" in lines[-2]


def test_the_last_words_of_a_process_come_out_in_order() -> None:
    code, said = run(DIES)
    assert code == 1
    *lines, last = [line for line in said.splitlines() if not line.startswith(" ")]
    assert [line.split("] ")[1].split(" process=")[0] for line in lines[:-1]] == [f"line {n}" for n in range(1000)]
    assert "thread divider has ended by an exception" in lines[-1]
    assert "this process ends by an exception" in last
    assert "  ZeroDivisionError: division by zero" in said
    assert "  KeyError: 'lost'" in said


def test_an_unread_log_holds_no_process_back_that_ends() -> None:
    with start(ENDS_UNREAD) as process:
        try:
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()


def test_a_forked_process_logs_its_own_records_only() -> None:
    code, said = run(FORKS)
    assert code == 0
    assert [said.count(f"parent {number} ") for number in range(1000)] == [1] * 1000
    assert (said.count("] child"), said.count("still the parent")) == (1, 1)


@pytest.mark.parametrize("is_blocking", [True, False])
def test_a_slow_reader_gets_everything_that_fits(is_blocking: bool) -> None:
    """A parent may have made the pipe non-blocking."""
    reading, writing = os.pipe()
    try:
        os.set_blocking(writing, is_blocking)
        with subprocess.Popen([sys.executable, "-c", ENDS_UNREAD], cwd=ROOT, stderr=writing) as process:
            os.close(writing)
            got = b""
            while chunk := os.read(reading, 10_000):
                got += chunk
                time.sleep(0.001)
            assert process.wait(timeout=60) == 0
    finally:
        os.close(reading)
    assert got.count(b" line ") == 1000


def test_a_full_disk_stops_no_process() -> None:
    with open("/dev/full", "wb") as full:
        process = subprocess.run(
            [sys.executable, "-c", LOGS_UNREAD],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=full,
            timeout=60,
            check=True,
        )
    assert 0 < float(process.stdout) <= NUM_LINES
