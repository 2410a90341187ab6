"""Keeps steps short while something decodes: limits the prefills of a plan, and learns from what steps took."""

from scheduler.core.messages import Plan
from scheduler.core.pacing.pace import Pace, StepLimit, StepTiming
from scheduler.core.pacing.prices import StepWork, pairs_of
from scheduler.core.state.decodes import Selection, size_of
from scheduler.core.state.plan_draft import PlanDraft
from scheduler.core.state.running import StepInFlight
from scheduler.core.state.state import State


class Pacer:
    def __init__(self, state: State, pace: Pace) -> None:
        self._state, self._pace = state, pace

    def limit(self, draft: PlanDraft, selection: Selection) -> StepLimit | None:
        """The time for prefills beside the selected decodes and the forced tokens in the draft. None: nothing decodes,
        so that no one waits for the next token."""
        state = self._state
        if not len(state.decodes) and not state.running.drafting:
            return None
        work = StepWork(
            num_decode_tokens=size_of(selection) + draft.num_forced_tokens,
            num_context_tokens=state.decodes.num_context_tokens(selection)
            + sum(sequence.num_computed_tokens for sequence in draft.forced),
        )
        return self._pace.limit(work, num_steps=self._num_steps)

    @property
    def _num_steps(self) -> int:
        """Steps that pass between two tokens of a sequence. A pipeline deals its decodes out over the steps in flight;
        without one, a sequence that waits for results is in one of them at a time."""
        settings = self._state.settings
        is_dealt = settings.num_stages > 1 or self._state.decodes.num_holding > 0
        return settings.max_steps_in_flight if is_dealt else 1

    def note_plan(self, plan: Plan, draft: PlanDraft, limit: StepLimit | None, now: float) -> None:
        """Notes what a plan computes, and when it was made."""
        state, pace, chunks = self._state, self._pace, draft.chunks
        work = StepWork(
            num_prefill_tokens=plan.num_prefill_tokens,
            num_pairs=sum(pairs_of(sequence.num_computed_tokens - count, count) for sequence, count in chunks),
            num_decode_tokens=plan.num_decodes + len(plan.draft_token_ids),
            num_context_tokens=plan.num_context_tokens - sum(sequence.num_computed_tokens for sequence, _ in chunks),
            num_embeddings=state.items.num_encoded if plan.encoded_items else 0,
        )
        is_limited = limit is not None and limit.is_used
        if is_limited:
            plan.predicted_seconds = pace.predict(work)
        state.in_flight.note_timing(
            StepTiming(work=work, planned_at=now, is_limited=is_limited, predicted=plan.predicted_seconds)
        )

    def note_return(self, awaited: StepInFlight, now: float) -> None:
        """Learns from the time of a step that has returned."""
        timing, stats = awaited.timing, self._state.stats
        seconds = self._pace.note_return(timing, now, num_steps=self._num_steps)
        if timing is not None and timing.is_limited:
            stats.num_limited_steps += 1
            stats.num_late_steps += seconds > self._pace.target / self._num_steps
            stats.predicted_seconds += timing.predicted
            stats.measured_seconds += seconds
