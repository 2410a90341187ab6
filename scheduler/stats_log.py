"""The line of statistics every 10 s, and the warnings of preemptions, in the form that users of vLLM know."""

import dataclasses
import logging
from collections.abc import Callable, Iterable

from scheduler.messages import CoreStats, Preempted
from scheduler.status import SchedulerStatus

log = logging.getLogger("octavo.scheduler")

_INTERVAL_S = 10.0
_WARN_EACH = 50


class StatsLog:
    """Silent while nothing happens: one line after the last activity, then none."""

    def __init__(self, *, enabled: bool, now: float) -> None:
        self._enabled = enabled
        self._since = now
        self._before = CoreStats()
        self._was_active = False

    def tick(self, status: SchedulerStatus, now: float) -> None:
        """Logs if it is time. To be called about once a second."""
        elapsed = now - self._since
        if not self._enabled or elapsed < _INTERVAL_S:
            return
        stats, before, load = status.stats, self._before, status.load
        is_active = stats != before or bool(load.num_running or load.num_waiting)
        if is_active or self._was_active:
            queries = stats.num_prefix_queries - before.num_prefix_queries
            hits = stats.num_prefix_hits - before.num_prefix_hits
            log.info(
                "Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, Running: %d reqs, "
                "Waiting: %d reqs, KV cache usage: %.1f%%, Prefix cache hit rate: %.1f%%, Preemptions: %d",
                (stats.num_prompt_tokens - before.num_prompt_tokens) / elapsed,
                (stats.num_output_tokens - before.num_output_tokens) / elapsed,
                load.num_running,
                load.num_waiting,
                100 * status.kv_cache_usage,
                100 * hits / queries if queries else 0.0,
                stats.num_preemptions,
            )
        self._since, self._before, self._was_active = now, dataclasses.replace(stats), is_active


def warn_of_preemptions(events: Iterable[Preempted], trace_id: Callable[[int], str]) -> None:
    """The first, and then every 50th. trace_id: by a group's number; empty if it is not traced."""
    for event in events:
        if event.num_preemptions % _WARN_EACH == 1:
            traced = trace_id(event.key[0])
            log.warning(
                "Sequence %s is preempted by PreemptionMode.%s mode because there is not enough KV cache space. "
                "This can affect the end-to-end performance. Increase gpu_memory_utilization or tensor_parallel_size "
                "to provide more KV cache memory (with CPU workers: kv_cache_memory). "
                "total_cumulative_preemption_cnt=%d",
                event.key[1],
                "SWAP" if event.swapped else "RECOMPUTE",
                event.num_preemptions,
                extra={"request_id": event.request_id} | ({"trace_id": traced} if traced else {}),
            )
