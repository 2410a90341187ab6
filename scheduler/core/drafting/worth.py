"""Trust in the estimates of drafts: the share of the expected ones that came true lately."""

# Expected and accepted drafts count half after about 140 later ones. They begin as if this many had come true.
_DECAY, _FIRST_DRAFTS = 0.995, 16.0


class Worth:
    def __init__(self) -> None:
        self._expected = self._accepted = _FIRST_DRAFTS

    @property
    def trust(self) -> float:
        """The share of the expected drafts that came true; at most 1. The drafts that look best are taken, so that
        estimates err on their side."""
        return self._accepted / self._expected

    def note_verified(self, expected: float, num_accepted: int) -> None:
        """Takes a step's drafts. expected: how many of them the estimates promised."""
        decay = _DECAY ** max(expected, num_accepted)
        self._expected = self._expected * decay + expected
        # What was better than promised once makes up for nothing later.
        self._accepted = min(self._accepted * decay + num_accepted, self._expected)

    def save(self) -> tuple[float, float]:
        """Returns what `restore` takes."""
        return self._expected, self._accepted

    def restore(self, expected: float, accepted: float) -> None:
        """Takes what `save` returned."""
        self._expected, self._accepted = expected, accepted
