"""The latest steps, noted while a person watches them."""

from collections import deque
from dataclasses import dataclass

from scheduler.core.messages import Plan
from scheduler.sessions.observation import StepSeen

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
    """Costs a comparison a step while nobody watches."""

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
