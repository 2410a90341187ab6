"""The pace of steps: their measured times against the predicted ones, and the time limit of each."""

from dataclasses import dataclass

from scheduler.core.pacing.prices import Prices, StepWork

# A share of this many of the limited steps should end in time. Those that don't make the margin grow by _GROWTH, the
# others let it shrink by what keeps the balance. So steps that take twice as long are short enough after 15 of them.
_SHARE_IN_TIME, _GROWTH = 0.97, 1.05
_SHRINKAGE = _GROWTH ** (-(1 - _SHARE_IN_TIME) / _SHARE_IN_TIME)
_LEAST_MARGIN, _MOST_MARGIN = 0.8, 4.0
# Steps predicted to take less than this share of the limit do not change the margin.
_LEAST_SHARE = 0.5
# Prefill tokens of a step beyond what has been measured: at most twice as many, and this many at first.
_FIRST_TOKENS = 64
# Beyond all bounds that a step has.
_ANY_NUMBER = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """The facts about a step that are known when it is planned."""

    work: StepWork
    planned_at: float
    # True if its prefills had a limit.
    is_limited: bool = False
    # Seconds, without the margin; 0 if it had no limit.
    predicted: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPace:
    prices: list[list[float]]
    margin: float
    most_tokens: int
    last_return: float


class StepLimit:
    """The time that the prefills of one step have: see `Pace.limit`."""

    __slots__ = ("_least", "_most", "_num_embeddings", "_num_spent", "_prices", "_seconds")

    def __init__(self, prices: Prices, seconds: float, *, least: int, most: int) -> None:
        """seconds: what decodes leave; may be below 0. least, most: bounds of the prefill tokens, whatever they
        take."""
        self._prices, self._seconds = prices, seconds
        self._least, self._most = least, most
        self._num_spent = self._num_embeddings = 0

    @property
    def is_used(self) -> bool:
        """True if the step computes a prefill."""
        return self._num_spent > 0

    def num_tokens(self, start: int, num_embeddings: int = 0) -> int:
        """How many tokens from position `start` on a prefill may compute. num_embeddings: those that must be encoded
        for them."""
        seconds = self._seconds - num_embeddings * self._prices.embedding_seconds
        most = max(0, self._most - self._num_spent)
        return max(self._prices.num_prefill_tokens(seconds, start, most=most), self._least - self._num_spent)

    @property
    def num_embeddings(self) -> int:
        """How many embeddings there is time to encode."""
        return self._num_within(self._prices.embedding_seconds)

    @property
    def num_drafts(self) -> int:
        """How many drafts there is time for beside the prefills."""
        return self._num_within(self._prices.draft_seconds)

    def _num_within(self, price: float) -> int:
        if self._seconds <= 0:
            return 0
        return _ANY_NUMBER if self._seconds >= price * _ANY_NUMBER else int(self._seconds / price)

    def spend(self, count: int, start: int) -> None:
        """Records that the step computes so many tokens of a prefill."""
        self._seconds -= self._prices.prefill_seconds(start, count)
        self._num_spent += count

    def note_encoded(self, num_embeddings: int) -> None:
        """Records how many embeddings the step encodes so far."""
        self._seconds -= (num_embeddings - self._num_embeddings) * self._prices.embedding_seconds
        self._num_embeddings = num_embeddings


class Pace:
    """Steps should take at most `target` seconds. Times are those of the core's calls: it knows no clock."""

    def __init__(self, target: float, *, least_tokens: int) -> None:
        self.target, self._least_tokens = target, least_tokens
        self._prices = Prices()
        # Predictions are multiplied by it.
        self._margin = 1.0
        self._most_tokens = _FIRST_TOKENS // 2
        # Steps return one after the other, and the workers begin one after finishing the last.
        self._last_return = 0.0

    def limit(self, work: StepWork, *, num_steps: int) -> StepLimit:
        """The time that is left for prefills in a step with the given work. num_steps: that pass between two tokens of
        a sequence."""
        seconds = self.target / num_steps / self._margin - self._prices.seconds(work)
        return StepLimit(self._prices, seconds, least=self._least_tokens, most=2 * self._most_tokens)

    def predict(self, work: StepWork) -> float:
        """Seconds of a step, without the margin."""
        return self._prices.seconds(work)

    def note_return(self, timing: StepTiming | None, now: float, *, num_steps: int) -> float:
        """Records the end of a step. timing: None if it computed nothing. Returns the step's duration in seconds."""
        since, self._last_return = self._last_return, now
        if timing is None:
            return 0.0
        seconds = now - max(timing.planned_at, since)
        if seconds <= 0:
            return 0.0
        if timing.is_limited and timing.predicted * self._margin >= _LEAST_SHARE * self.target / num_steps:
            factor = _GROWTH if seconds > timing.predicted * self._margin else _SHRINKAGE
            self._margin = min(max(self._margin * factor, _LEAST_MARGIN), _MOST_MARGIN)
        self._prices.note(timing.work, seconds)
        self._most_tokens = max(self._most_tokens, timing.work.num_prefill_tokens)
        return seconds

    # --- Snapshots

    def save(self) -> SavedPace:
        return SavedPace(
            prices=self._prices.save(),
            margin=self._margin,
            most_tokens=self._most_tokens,
            last_return=self._last_return,
        )

    def restore(self, saved: SavedPace) -> None:
        """Raises ValueError if it does not fit."""
        self._prices.restore(saved.prices)
        self._margin, self._most_tokens = saved.margin, saved.most_tokens
        self._last_return = saved.last_return
