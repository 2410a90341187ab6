"""The step loop's reports: its status, a line of statistics every 10 s, warnings of preemptions, metrics of steps,
spans, and the latest steps while a person watches them.
"""

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import zip_longest

from configs.options import Options
from runtime.telemetry.traceparent import is_sampled
from runtime.telemetry.tracing import Tracing
from scheduler.core.core import Core
from scheduler.core.messages import CoreStats, Plan, Preempted
from scheduler.sessions.observation import StepSeen
from scheduler.sessions.sessions import LiveGroup
from scheduler.telemetry.metrics import GroupTimes, SchedulerMetrics, SchedulerStatus
from scheduler.telemetry.spans import RequestSpans

# Steps that are kept, and seconds after a look in which further ones are noted.
_MOST_STEPS = 128
_WATCHED_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Noted:
    step: int
    num_decode_tokens: int
    num_draft_tokens: int
    num_prefill_tokens: int
    seconds: float
    returned: float


class StepWatch:
    """The latest steps, noted while a person watches them. Costs a comparison a step while nobody does."""

    def __init__(self) -> None:
        self._until = 0.0
        self._in_flight: dict[int, tuple[int, int, int]] = {}
        self._noted: deque[_Noted] = deque(maxlen=_MOST_STEPS)

    def note_sent(self, plan: Plan, began: float) -> None:
        if began >= self._until:
            return
        # Void steps never return; their numbers come again in the next epoch.
        if len(self._in_flight) >= _MOST_STEPS:
            self._in_flight.clear()
        self._in_flight[plan.step] = plan.num_decodes, len(plan.draft_token_ids), plan.num_prefill_tokens

    def note_returned(self, step: int, seconds: float, now: float) -> None:
        noted = self._in_flight.pop(step, None) if self._in_flight else None
        if noted is not None:
            decodes, drafts, prefill = noted
            self._noted.append(
                _Noted(
                    step=step,
                    num_decode_tokens=decodes,
                    num_draft_tokens=drafts,
                    num_prefill_tokens=prefill,
                    seconds=seconds,
                    returned=now,
                )
            )

    def look(self, now: float) -> tuple[StepSeen, ...]:
        """Returns the steps of the last minute, and notes further ones for ten seconds."""
        self._until = now + _WATCHED_S
        return tuple(
            StepSeen(
                step=each.step,
                num_decode_tokens=each.num_decode_tokens,
                num_draft_tokens=each.num_draft_tokens,
                num_prefill_tokens=each.num_prefill_tokens,
                seconds=each.seconds,
                age=now - each.returned,
            )
            for each in self._noted
            if now - each.returned < 60.0
        )


log = logging.getLogger("octavo.scheduler")

_INTERVAL_S = 10.0
_WARN_EACH = 50


class StatsLog:
    """Logs statistics every 10 s. When activity ends, it logs one more line, then none."""

    def __init__(self, *, enabled: bool, now: float) -> None:
        self._enabled = enabled
        self._since = now
        self._before = CoreStats()
        self._was_active = False

    def tick(self, status: SchedulerStatus, now: float) -> None:
        """Logs a line if it is due. Call it about once a second."""
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
            if stats.num_drafts > before.num_drafts:
                _log_speculation(stats, before, elapsed)
        self._since, self._before, self._was_active = now, dataclasses.replace(stats), is_active


def _log_speculation(stats: CoreStats, before: CoreStats, elapsed: float) -> None:
    """Logs the drafts since `before`, in vLLM's form. A mean length counts the token after the last accepted draft."""
    num_drafts = stats.num_drafts - before.num_drafts
    num_tokens = stats.num_speculated_tokens - before.num_speculated_tokens
    positions = zip_longest(stats.num_accepted_by_position, before.num_accepted_by_position, fillvalue=0)
    accepted = [now - then for now, then in positions]
    num_accepted = sum(accepted)
    log.info(
        "SpecDecoding metrics: Mean acceptance length: %.2f, Accepted throughput: %.2f tokens/s, Drafted throughput: "
        "%.2f tokens/s, Accepted: %d tokens, Drafted: %d tokens, Per-position acceptance rate: %s, "
        "Avg Draft acceptance rate: %.1f%%",
        1 + num_accepted / num_drafts,
        num_accepted / elapsed,
        num_tokens / elapsed,
        num_accepted,
        num_tokens,
        ", ".join(f"{count / num_drafts:.3f}" for count in accepted),
        100 * num_accepted / num_tokens,
    )


def warn_of_preemptions(events: Iterable[Preempted], trace_id: Callable[[int], str]) -> None:
    """Warns of the first preemption and then of every 50th.

    trace_id: returns the trace of a group, by its number; empty if it is not traced.
    """
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


class Reports:
    """All that the step loop reports, and its status. Only for its thread, except `status` and `metrics`."""

    def __init__(self, options: Options, replica: int, tracing: Tracing | None) -> None:
        """tracing: None if requests are not traced."""
        # Always replaced as a whole, so that any thread may read it.
        self.status = SchedulerStatus()
        self.metrics = SchedulerMetrics(lambda: self.status, options, replica)
        self._spans = None if tracing is None else RequestSpans(tracing, replica)
        # None until somebody watches.
        self._watch: StepWatch | None = None
        self._stats_log = StatsLog(enabled=not options.disable_log_stats, now=time.monotonic())

    def tick(self, now: float) -> None:
        """Logs statistics if they are due. Call it about once a second."""
        self._stats_log.tick(self.status, now)

    def note_sent(self, plan: Plan, began: float) -> None:
        """Reports a plan that was sent. began: the `now` that the core was given for it, on time.monotonic()."""
        self.metrics.schedule_duration.observe(time.monotonic() - began)
        self.metrics.step_tokens.observe(plan.num_tokens)
        if self._watch is not None:
            self._watch.note_sent(plan, began)
        if self._spans is not None:
            self._spans.note_sent(plan, began)

    def note_returned(self, step: int, seconds: float, now: float) -> None:
        """Reports the result of a step. seconds: the time that the workers took."""
        self.metrics.step_duration.observe(seconds)
        if self._watch is not None:
            self._watch.note_returned(step, seconds, now)
        if self._spans is not None:
            self._spans.note_returned(step, now)

    def watch_steps(self, now: float) -> tuple[StepSeen, ...]:
        """Returns the latest steps, and notes further ones for a while."""
        if self._watch is None:
            self._watch = StepWatch()
        return self._watch.look(now)

    def note_ended(self, core: Core, groups: Iterable[LiveGroup]) -> None:
        """Reports groups that have ended since the last call."""
        for group in groups:
            # None: so many groups ended at once that this timeline is gone.
            timeline = core.timeline(group.number)
            if timeline is None or not timeline.is_finished:
                continue
            times = GroupTimes.of(timeline)
            self.metrics.observe_ended(times)
            if self._spans is not None and is_sampled(group.traceparent):
                self._spans.tell(group, timeline, times)
