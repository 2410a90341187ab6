"""The lag of event loops and polling threads is a number, and what holds them is named in the log."""

import asyncio
import ctypes
import logging
import threading
import time

import pytest
from prometheus_client import CollectorRegistry

from runtime.telemetry.lag import WatchedThread, lag_histogram, watch_lag

_HELD_S = 0.4


def _seconds(registry: CollectorRegistry, thread: str) -> float:
    return registry.get_sample_value("octavo_event_loop_lag_seconds_sum", {"thread": thread}) or 0.0


@pytest.fixture
def every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine something else may be logged before."""
    monkeypatch.setattr("runtime.telemetry.lag._LOG_EVERY_S", 0.0)


def _what_holds_the_loop() -> None:
    time.sleep(_HELD_S)


@pytest.mark.usefixtures("every_line")
async def test_a_held_event_loop_is_measured_and_its_stack_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    with watch_lag(lag_histogram(registry)):
        await asyncio.sleep(0.1)
        before = _seconds(registry, "event_loop")
        _what_holds_the_loop()
        await asyncio.sleep(0.1)
        after = _seconds(registry, "event_loop")
    # The timer was due up to 50 ms after the stretch began.
    assert after - before > _HELD_S - 0.06
    (message,) = [text for text in caplog.messages if "_what_holds_the_loop" in text]
    assert message.startswith("event_loop has been held for ")
    assert "by _what_holds_the_loop (runtime/test_lag.py:" in message


@pytest.mark.usefixtures("every_line")
async def test_a_call_that_holds_the_interpreters_lock_is_told_from_a_busy_loop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def hold_the_lock() -> None:
        # PyDLL keeps the lock, as a library does that never releases it.
        ctypes.PyDLL(None).usleep(int(_HELD_S * 1e6))
        time.sleep(0.2)

    with watch_lag(lag_histogram(CollectorRegistry())):
        await asyncio.sleep(0.1)
        await asyncio.to_thread(hold_the_lock)
    messages = [text for text in caplog.messages if text.startswith("no thread could run for ")]
    assert any("hold_the_lock (runtime/test_lag.py:" in message for message in messages)


async def test_a_thread_that_polls_says_when_it_works(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    histogram = lag_histogram(registry)
    watched, may_go_on = WatchedThread("step_loop", histogram), threading.Event()

    def poll() -> None:
        watched.begin()
        for _ in range(2):
            watched.work(time.monotonic())
            may_go_on.wait(_HELD_S)
            watched.rest(time.monotonic())
            # Waiting is no lag.
            time.sleep(_HELD_S)

    with watch_lag(histogram, watched):
        await asyncio.to_thread(poll)
    assert _seconds(registry, "step_loop") >= 2 * _HELD_S
    assert registry.get_sample_value("octavo_event_loop_lag_seconds_count", {"thread": "step_loop"}) == 2
    # One log line for both: the second one comes within 10 s.
    (message,) = [text for text in caplog.messages if text.startswith("step_loop has been held for ")]
    assert "< poll (runtime/test_lag.py:" in message


async def test_nothing_is_logged_of_a_loop_that_runs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Longer than a busy machine lets a process wait.
    monkeypatch.setattr("runtime.telemetry.lag._HELD_S", 5.0)
    caplog.set_level(logging.DEBUG, "octavo.lag")
    registry = CollectorRegistry()
    with watch_lag(lag_histogram(registry)):
        await asyncio.sleep(0.3)
    assert not caplog.messages
    assert (registry.get_sample_value("octavo_event_loop_lag_seconds_count", {"thread": "event_loop"}) or 0) >= 2
    assert not [thread for thread in threading.enumerate() if thread.name == "lag"]
