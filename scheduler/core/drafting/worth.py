"""What drafts were worth lately: how many of those that were expected came true, and whether steps had any."""

# Expected and accepted drafts count half after about 140 later ones. They begin as if this many had come true.
_DECAY, _FIRST_DRAFTS = 0.995, 16.0
# While no step has drafts, pauses of the drafters grow up to this many steps. A text that turns predictable is then
# noticed as many steps late, and drafters take a seventh of the time that they would take in each step.
_LONGEST_PAUSE = 6


class Worth:
    def __init__(self) -> None:
        self._expected = self._accepted = _FIRST_DRAFTS
        # Steps of the next pause, and those that are left of this one.
        self._pause = self._num_left = 0

    # --- How far estimates can be trusted

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

    # --- Pauses

    @property
    def is_pausing(self) -> bool:
        return self._num_left > 0

    def pauses(self) -> bool:
        """Counts a step. Returns True if it is part of a pause, in which nothing is drafted."""
        if not self._num_left:
            return False
        self._num_left -= 1
        return True

    def note_step(self, *, has_drafts: bool) -> None:
        """Takes a step that is not part of a pause."""
        self._pause = 0 if has_drafts else min(2 * self._pause + 1, _LONGEST_PAUSE)
        self._num_left = self._pause

    # --- Snapshots

    def save(self) -> tuple[float, float]:
        """Returns what `restore` takes, and ends a pause, as `restore` does."""
        self._pause = self._num_left = 0
        return self._expected, self._accepted

    def restore(self, expected: float, accepted: float) -> None:
        """Takes what `save` returned."""
        self._expected, self._accepted = expected, accepted
