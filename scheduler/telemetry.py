"""What the step loop tells of steps, and of requests that have ended: to metrics, and to traces if there are any."""

import time
from collections.abc import Iterable

from runtime.trace_context import is_sampled
from runtime.tracing import Tracing
from scheduler.core import Core
from scheduler.group_times import GroupTimes
from scheduler.messages import Plan
from scheduler.metrics import SchedulerMetrics
from scheduler.request_spans import RequestSpans
from scheduler.sessions import LiveGroup


class Telemetry:
    """On the step loop's thread."""

    def __init__(self, metrics: SchedulerMetrics, tracing: Tracing | None, replica: int) -> None:
        self._metrics = metrics
        self._spans = None if tracing is None else RequestSpans(tracing, replica)

    def note_sent(self, plan: Plan, began: float) -> None:
        """began: when the plan was begun, as the core was told; on time.monotonic()."""
        self._metrics.schedule_duration.observe(time.monotonic() - began)
        self._metrics.step_tokens.observe(plan.num_tokens)
        if self._spans is not None:
            self._spans.note_sent(plan, began)

    def note_returned(self, step: int, seconds: float, now: float) -> None:
        """seconds: that the workers took for it."""
        self._metrics.step_duration.observe(seconds)
        if self._spans is not None:
            self._spans.note_returned(step, now)

    def tell_ended(self, core: Core | None, groups: Iterable[LiveGroup]) -> None:
        """groups: those that have ended since the last call."""
        for group in groups:
            # None: so many ended at once that its timeline is gone.
            timeline = core.timeline(group.number) if core else None
            if timeline is None or not timeline.is_finished:
                continue
            times = GroupTimes.of(timeline)
            self._metrics.observe_ended(times)
            if self._spans is not None and is_sampled(group.traceparent):
                self._spans.tell(group, timeline, times)
