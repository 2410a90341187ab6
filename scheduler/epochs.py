"""When a replica's epochs begin and end, and whether its ranks had failed then."""

import logging
import math
import time
from collections.abc import Collection

log = logging.getLogger("octavo.scheduler")

# Between an epoch in which no step succeeded and the next one.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
# When a rank's collective has failed, the rank that is the cause gets so long to show: a death is seen in milliseconds.
_CAUSE_WAIT_S = 1.0


class Epochs:
    """The epoch in force, or the one that was last. Times are monotonic seconds."""

    def __init__(self) -> None:
        # Grows over restarts of the scheduler, too.
        self.number = int(time.time() * 1000)
        # Its Resets are out, and it has not ended.
        self.is_open = False
        # All ranks have said Ready, and it has not ended.
        self.is_ready = False
        # Ranks have failed, or died, since the last epoch that was ready. A rank that was lost has died if it is
        # another process that comes back: the instances of those that may have ended that epoch are kept until then.
        self._has_failed = False
        self._lost_instances: set[int] = set()
        # Why the last one has ended.
        self.cause = ""
        # A rank has failed because of another one, which has not shown yet; until when it may.
        self._consequence = ""
        self._cause_wait_ends = math.inf
        self._pause = 0.0
        self._next_at = 0.0

    def next_check(self, now: float) -> float:
        """When it should be looked at again, if nothing happens; infinite if it need not be."""
        may_begin_at = self._next_at if not self.is_open and self._next_at > now else math.inf
        return min(may_begin_at, self._cause_wait_ends)

    def may_begin(self, now: float) -> bool:
        return not self.is_open and now >= self._next_at

    def begin(self, number: int) -> None:
        """number: above those before."""
        assert not self.is_open, f"epoch {self.number} has not ended"
        assert number > self.number, f"epoch {number} after {self.number}"
        self.number = number
        self.is_open = True
        self._pause = min(max(2 * self._pause, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
        log.info("epoch %d begins", self.number)

    def pass_over(self, number: int, cause: str) -> None:
        """That one took place without the ranks of this replica."""
        assert not self.is_open, f"epoch {self.number} has not ended"
        assert number > self.number, f"epoch {number} after {self.number}"
        self.number, self.cause = number, cause

    def become_ready(self) -> bool:
        """Whether the one that was ready before it was ended by ranks that failed, or have died."""
        self.is_ready = True
        has_failed, self._has_failed = self._has_failed, False
        self._lost_instances.clear()
        return has_failed

    def note_success(self) -> None:
        """A step has returned."""
        self._pause = 0.0

    def end(self, cause: str, *, has_failed: bool = False, lost_instances: Collection[int] = ()) -> bool:
        """True if it was ready: what its ranks held is lost.

        has_failed: by what ranks did. lost_instances: of the ranks that may have died, which is not known yet.
        """
        if not self.is_open:
            return False
        self.is_open, self.cause = False, cause
        self._consequence, self._cause_wait_ends = "", math.inf
        # The first time at once; then the pauses grow until a step succeeds.
        self._next_at = time.monotonic() + (self._pause if self._pause > _FIRST_PAUSE_S else 0.0)
        log.warning("epoch %d has ended: %s", self.number, cause)
        was_ready, self.is_ready = self.is_ready, False
        if was_ready:
            self._has_failed, self._lost_instances = has_failed, set(lost_instances)
        return was_ready

    def note_return(self, before: int, instance: int) -> None:
        """A process of this instance is, or takes, the rank that the one before was."""
        if before in self._lost_instances:
            self._has_failed |= instance != before
            self._lost_instances.discard(before)

    def await_cause(self, consequence: str, now: float) -> bool:
        """A rank has failed because of another. True if that one is to be looked for: it may have died, or what it has
        to say is on its way."""
        if not self.is_open or self._consequence:
            return False
        self._consequence, self._cause_wait_ends = consequence, now + _CAUSE_WAIT_S
        return True

    def unexplained(self, now: float) -> str:
        """A consequence whose cause has not shown in time; empty if there is none."""
        return self._consequence if now >= self._cause_wait_ends else ""
