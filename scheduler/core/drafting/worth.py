"""What drafts were worth lately: how many of those that were expected came true, and what steps gained by them."""

# Expected and accepted drafts count half after about 700 later ones. They begin as if this many had come true.
_DECAY, _FIRST_DRAFTS = 0.999, 16.0
# A step's gain is its expected tokens a second over those without drafts. Choosing drafts takes the scheduler 0.3 to 1
# ms a step, so that they are not worth it below this gain, as an average in which each step has this weight.
_LEAST_WORTH, _WEIGHT = 1.02, 1 / 16
# The average begins with the first one, and after a pause with the second: so 25 steps without drafts begin a
# pause, then 15.
_FIRST_GAIN, _GAIN_AFTER_PAUSE = 1.1, 1.05
# Steps of a pause: each is twice as long as the one before, up to the last length, as long as no drafts are worth it.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 16, 64


class Worth:
    def __init__(self) -> None:
        self._expected = self._accepted = _FIRST_DRAFTS
        self._gain, self._pause, self._num_left = _FIRST_GAIN, _SHORTEST_PAUSE, 0

    # --- How far estimates can be trusted

    @property
    def trust(self) -> float:
        """The share of the expected drafts that came true; at most 1. The drafts that look best are taken, so that
        estimates err on their side."""
        return min(1.0, self._accepted / self._expected)

    def note_verified(self, expected: float, num_accepted: int) -> None:
        """Takes a step's drafts. expected: how many of them the estimates promised."""
        decay = _DECAY ** max(expected, num_accepted)
        self._expected = self._expected * decay + expected
        self._accepted = self._accepted * decay + num_accepted

    # --- Pauses

    def pauses(self) -> bool:
        """Counts a step. Returns True if it is part of a pause, in which nothing is drafted."""
        if not self._num_left:
            return False
        self._num_left -= 1
        return True

    def note_gain(self, gain: float) -> None:
        """Takes the expected gain of a step that is not part of a pause; 1: it has no drafts."""
        self._gain += _WEIGHT * (gain - self._gain)
        if self._gain < _LEAST_WORTH:
            self._num_left, self._gain = self._pause, _GAIN_AFTER_PAUSE
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        elif self._gain > _GAIN_AFTER_PAUSE:
            self._pause = _SHORTEST_PAUSE

    # --- Snapshots

    def save(self) -> tuple[float, float]:
        """Returns what `restore` takes, and begins a new average, as `restore` does."""
        self._gain, self._pause, self._num_left = _FIRST_GAIN, _SHORTEST_PAUSE, 0
        return self._expected, self._accepted

    def restore(self, expected: float, accepted: float) -> None:
        """Takes what `save` returned."""
        self._expected, self._accepted = expected, accepted
