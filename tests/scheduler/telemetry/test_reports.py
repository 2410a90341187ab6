"""The statistics line and the preemption warning, with a clock that the test sets."""

import logging
from typing import Any

import pytest

from scheduler.core.messages import CoreLoad, CoreStats, Preempted
from scheduler.telemetry.metrics import SchedulerStatus
from scheduler.telemetry.reports import StatsLog, warn_of_preemptions


def status(running: int = 0, **stats: Any) -> SchedulerStatus:
    load = CoreLoad(num_running=running, num_waiting=0, num_free_blocks=30, num_blocks=40, num_queued_tokens=0)
    return SchedulerStatus(load=load, stats=CoreStats(**stats))


def test_a_line_each_ten_seconds_while_there_is_or_was_activity(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "octavo.scheduler")
    stats_log = StatsLog(enabled=True, now=100.0)
    stats_log.tick(status(), 111.0)
    assert not caplog.messages  # nothing has happened
    active = status(
        2, num_prompt_tokens=50, num_output_tokens=100, num_prefix_queries=80, num_prefix_hits=20, num_preemptions=3
    )
    stats_log.tick(active, 115.0)
    assert not caplog.messages  # too early
    stats_log.tick(active, 121.0)
    assert caplog.messages == [
        "Avg prompt throughput: 5.0 tokens/s, Avg generation throughput: 10.0 tokens/s, Running: 2 reqs, "
        "Waiting: 0 reqs, KV cache usage: 25.0%, Prefix cache hit rate: 25.0%, Preemptions: 3"
    ]
    idle = status(
        0, num_prompt_tokens=50, num_output_tokens=100, num_prefix_queries=80, num_prefix_hits=20, num_preemptions=3
    )
    for now in (131.0, 141.0, 151.0):
        stats_log.tick(idle, now)
    # One more line, which shows that it is idle; then none.
    assert len(caplog.messages) == 2
    assert "Running: 0 reqs" in caplog.messages[1]
    assert "generation throughput: 0.0" in caplog.messages[1]


def test_speculation_has_a_line_of_its_own_if_there_were_drafts(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "octavo.scheduler")
    stats_log = StatsLog(enabled=True, now=0.0)
    before: dict[str, Any] = {"num_drafts": 10, "num_speculated_tokens": 20, "num_accepted_by_position": (5,)}
    stats_log.tick(status(1, **before), 10.0)
    later: dict[str, Any] = {"num_drafts": 18, "num_speculated_tokens": 60, "num_accepted_by_position": (11, 4)}
    stats_log.tick(status(1, **later), 20.0)
    stats_log.tick(status(1, **later), 30.0)
    assert [message for message in caplog.messages if "SpecDecoding" in message] == [
        "SpecDecoding metrics: Mean acceptance length: 1.50, Accepted throughput: 0.50 tokens/s, Drafted throughput: "
        "2.00 tokens/s, Accepted: 5 tokens, Drafted: 20 tokens, Per-position acceptance rate: 0.500, "
        "Avg Draft acceptance rate: 25.0%",
        "SpecDecoding metrics: Mean acceptance length: 2.25, Accepted throughput: 1.00 tokens/s, Drafted throughput: "
        "4.00 tokens/s, Accepted: 10 tokens, Drafted: 40 tokens, Per-position acceptance rate: 0.750, 0.500, "
        "Avg Draft acceptance rate: 25.0%",
    ]


def test_disable_log_stats_is_heeded(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "octavo.scheduler")
    StatsLog(enabled=False, now=0.0).tick(status(1, num_output_tokens=5), 60.0)
    assert not caplog.messages


def test_preemptions_warn_at_the_first_and_then_every_50th(caplog: pytest.LogCaptureFixture):
    events = [Preempted(key=(1, 0), request_id="r", num_preemptions=count) for count in range(1, 152)]
    warn_of_preemptions(events, lambda group: "")
    assert [message.rpartition("=")[2] for message in caplog.messages] == ["1", "51", "101", "151"]
