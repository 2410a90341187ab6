"""The spans of traced groups that have ended.

octavo.sequence-group    parent: the router's octavo.residence. Its events are the moments of `octavo explain`
└── octavo.step          each step that computed a part of its prefill, recomputes included
"""

from collections import OrderedDict

from runtime.telemetry.tracing import Tracing
from scheduler.core.messages import Moment, Plan, Timeline
from scheduler.sessions.sessions import LiveGroup
from scheduler.telemetry.metrics import GroupTimes

# Steps to remember until their groups have ended: 80 s of steps of 5 ms. A group that decodes for longer gets no spans
# of its steps.
_MAX_STEPS = 16_384
_PLANNED = (Moment.SCHEDULED, Moment.CHUNKED)


class RequestSpans:
    """The spans of one scheduler's groups. Steps that only decode have none: there would be a span per token."""

    def __init__(self, tracing: Tracing, replica: int) -> None:
        self._tracing, self._replica = tracing, replica
        # (step, time of its plan), as in timelines -> (its tokens, time of its result, None until then). Step numbers
        # alone are not unique: they start again with each epoch.
        self._steps: OrderedDict[tuple[int, float], tuple[int, float | None]] = OrderedDict()
        # Keys of `_steps` of the steps in flight, by step.
        self._in_flight: dict[int, tuple[int, float]] = {}

    def note_sent(self, plan: Plan, now: float) -> None:
        """Remembers a plan with prefills. now: the time that Core.schedule was given."""
        if plan.step == 1:
            self._in_flight.clear()
        if plan.chunks:
            key = self._in_flight[plan.step] = plan.step, now
            self._steps[key] = plan.num_tokens, None
            if len(self._steps) > _MAX_STEPS:
                self._steps.popitem(last=False)

    def note_returned(self, step: int, now: float) -> None:
        key = self._in_flight.pop(step, None)
        if key in self._steps:
            self._steps[key] = self._steps[key][0], now

    def tell(self, group: LiveGroup, timeline: Timeline, times: GroupTimes) -> None:
        """Records the spans of a sampled group from its finished timeline."""
        ends = [entry for entry in timeline.entries if entry.moment is Moment.FINISHED]
        attributes: dict[str, str | int | float | tuple[str, ...]] = {
            "gen_ai.request.id": group.request_id,
            "gen_ai.usage.input_tokens": timeline.entries[0].num_tokens,
            "gen_ai.usage.output_tokens": sum(entry.num_tokens for entry in ends),
            "gen_ai.response.finish_reasons": tuple(entry.reason for entry in ends),
            "octavo.replica": str(self._replica),
            "octavo.preemptions": sum(entry.moment is Moment.PREEMPTED for entry in timeline.entries),
        }
        latencies = {
            "time_in_queue": times.in_queue,
            "time_in_model_prefill": times.in_prefill,
            "time_in_model_decode": times.in_decode,
            "time_in_model_inference": times.in_inference,
        }
        attributes |= {f"gen_ai.latency.{name}": each for name, each in latencies.items() if each is not None}
        span = self._tracing.begin(
            "octavo.sequence-group", parent=group.traceparent, at=times.queued, attributes=attributes
        )
        for entry in timeline.entries:
            facts = {"octavo.choice": entry.choice, "octavo.step": entry.step, "octavo.tokens": entry.num_tokens}
            if entry.reason:
                span.add_event(entry.moment.value, entry.time, facts | {"octavo.reason": entry.reason})
            else:
                span.add_event(entry.moment.value, entry.time, facts)
        self._tell_steps(span.traceparent, timeline)
        span.end(times.finished)

    def _tell_steps(self, parent: str, timeline: Timeline) -> None:
        for entry in timeline.entries:
            if entry.moment not in _PLANNED:
                continue
            num_tokens, returned = self._steps.get((entry.step, entry.time), (0, None))
            if returned is not None:
                self._tracing.record(
                    "octavo.step",
                    parent=parent,
                    begin=entry.time,
                    end=returned,
                    attributes={
                        "octavo.step": entry.step,
                        "octavo.choice": entry.choice,
                        # Tokens of this choice, then of the whole step.
                        "octavo.tokens": entry.num_tokens,
                        "octavo.step.tokens": num_tokens,
                    },
                )
