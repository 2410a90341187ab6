"""Whether a replica gets on: a heartbeat says that it lives, a step that completes says that it computes.

A long prompt is computed in many steps, and a request in a queue waits while others' steps complete: both are progress.
"""


class Progress:
    """Of one Session. Pure: time is an input, in seconds of any clock that only grows."""

    def __init__(self, timeout: float) -> None:
        """timeout: seconds with something to run and without a step that make it stalled; 0: it never is."""
        # Until it gets on again: that nothing is left to run there is no sign of health.
        self.is_stalled = False
        self._timeout = timeout
        self._mark: tuple[int, int] | None = None
        self._since = 0.0

    def advance(self, now: float, *, epoch: int, last_step: int) -> bool:
        """What its latest message says. epoch: of its workers. Returns whether it has got on since the one before."""
        known, self._mark = self._mark, (epoch, last_step)
        if known == self._mark:
            return False
        self.is_stalled, self._since = False, now
        return known is not None

    def is_overdue(self, now: float, *, has_work: bool) -> bool:
        """Whether its next step is; once for each timeout."""
        if not has_work:
            self._since = now
        elif self._timeout and now - self._since >= self._timeout:
            self.is_stalled, self._since = True, now
            return True
        return False
