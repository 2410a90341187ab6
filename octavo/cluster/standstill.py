"""How long a process has made no progress, as its supervisor sees it."""

from runtime.awake_time import AwakeTime
from runtime.progress.page import ProgressPage


class Standstill:
    """Follows the page of one process. A process that starts does not stand still, however long it takes."""

    def __init__(self, page: ProgressPage, awake: AwakeTime) -> None:
        """awake: knows when the supervisor itself stood still and could not see progress."""
        self._page, self._awake = page, awake
        self._count, self._since = 0, 0.0

    def seconds(self, now: float) -> float:
        """Seconds without progress. now: on time.monotonic()."""
        if (count := self._page.count) != self._count:
            self._count, self._since = count, now
        return self._awake.seconds(self._since, now) if count else 0.0
