"""How long a group that has ended was at what."""

from dataclasses import dataclass

from scheduler.messages import Moment, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTimes:
    """On the clock of the timeline. None: it never got so far. Of several choices the first to get somewhere counts,
    and the last to end; a preemption counts to what it interrupted."""

    queued: float
    admitted: float | None
    first_token: float | None
    finished: float

    @classmethod
    def of(cls, timeline: Timeline) -> "GroupTimes":
        """timeline: finished."""
        first: dict[Moment, float] = {}
        for entry in timeline.entries:
            first.setdefault(entry.moment, entry.time)
        return cls(
            queued=timeline.entries[0].time,
            admitted=first.get(Moment.ADMITTED),
            first_token=first.get(Moment.DECODING),
            finished=timeline.entries[-1].time,
        )

    @property
    def in_queue(self) -> float:
        """Seconds, as all of these; of one that never ran all that it had."""
        return (self.finished if self.admitted is None else self.admitted) - self.queued

    @property
    def in_prefill(self) -> float | None:
        """From its row to its first token."""
        if self.admitted is None or self.first_token is None:
            return None
        return self.first_token - self.admitted

    @property
    def in_decode(self) -> float | None:
        """From its first token to its last."""
        return None if self.first_token is None else self.finished - self.first_token

    @property
    def in_inference(self) -> float | None:
        """From its row to its last token."""
        return None if self.admitted is None else self.finished - self.admitted
