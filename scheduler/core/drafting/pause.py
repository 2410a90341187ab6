"""Steps in which drafters are left alone, because nothing came of the last one."""

# Pauses grow up to this many steps, so that what changes meanwhile is noticed as many steps late, and nothing costs
# more than a seventh of what it would cost in each step.
_LONGEST_PAUSE = 6


class Pause:
    def __init__(self) -> None:
        # Steps of the latest pause, and those that are left of it.
        self.length = self._num_left = 0

    @property
    def is_on(self) -> bool:
        return self._num_left > 0

    def covers(self) -> bool:
        """Counts a step. Returns True if it is part of a pause."""
        if not self._num_left:
            return False
        self._num_left -= 1
        return True

    def note(self, *, in_vain: bool) -> None:
        """Takes a step that is not part of a pause. One in vain begins a pause."""
        self.length = self._num_left = min(2 * self.length + 1, _LONGEST_PAUSE) if in_vain else 0

    def end(self) -> None:
        self.length = self._num_left = 0
