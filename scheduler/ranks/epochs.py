"""Epochs of the ranks: when they begin and end, where their ranks find each other, and the events that tell of
them.
"""

import logging
import math
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from configs.options import Options
from protos import inference_pb2, step_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochBegun:
    """Every rank is ready for plans."""

    epoch: int
    # As all ranks have it; num_blocks is the least of theirs.
    model: inference_pb2.ModelInfo
    # Host blocks for swapped KV, the least of theirs.
    num_swap_blocks: int = 0
    # The epoch before was ended by ranks that failed, or have died: not by a connection that broke.
    after_failure: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochEnded:
    """KV cache and rows of the ranks are lost."""

    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReturned:
    result: step_pb2.StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Fatal:
    """This scheduler can't go on. permanent: nor could one that is started again (no such model, a corrupt file)."""

    cause: str
    permanent: bool


Event = EpochBegun | EpochEnded | StepReturned | Fatal


log = logging.getLogger("octavo.scheduler")


class Rendezvous(Protocol):
    def address(self, epoch: int, store_address: str) -> str:
        """For step_pb2.Reset. store_address: of the first rank's Hello."""
        ...

    def remove_all_but(self, epoch: int | None) -> None:
        """To be called once all ranks are ready in that epoch; None: once none will come any more."""
        ...


def rendezvous_of(options: Options, replica: int) -> Rendezvous | None:
    """The rendezvous of one replica's ranks. None for a single rank, and in lockstep: there the coordinator has it."""
    if options.world_size == 1 or options.in_lockstep:
        return None
    return RendezvousStores() if options.meets_over_tcp(replica) else RendezvousFiles(options.runtime_dir, replica)


def common_rendezvous(options: Options) -> Rendezvous:
    """The rendezvous of all replicas' ranks, in lockstep."""
    return RendezvousStores() if options.meets_over_tcp(0) else RendezvousFiles(options.runtime_dir, "all")


class RendezvousFiles:
    """A file for each epoch, made by the ranks. The directory is private: a process that can write to it can join them.

    A file is left alone while a rank may wait at it: a torch.distributed.FileStore whose file has gone waits for it for
    minutes, and hears of no other epoch meanwhile.
    """

    def __init__(self, directory: Path, owner: int | str) -> None:
        """directory: on the machine of all ranks, of mode 0700. owner: the replica, or another name."""
        self._directory, self._prefix = directory.absolute(), f"rendezvous-{owner}-"

    def address(self, epoch: int, store_address: str = "") -> str:
        return f"file:{self._path(epoch)}"

    def remove_all_but(self, epoch: int | None) -> None:
        """Files that a scheduler before this one has left go, too."""
        kept = None if epoch is None else self._path(epoch)
        for path in self._directory.glob(f"{self._prefix}*"):
            if path == kept:
                continue
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                log.warning("%s is left there: %s", path, error.strerror)

    def _path(self, epoch: int) -> Path:
        return self._directory / f"{self._prefix}{epoch}"


class RendezvousStores:
    """A store in the first rank's process, which may be another one in each epoch, elsewhere."""

    def address(self, epoch: int, store_address: str) -> str:
        return f"tcp:{store_address}/{epoch}"

    def remove_all_but(self, epoch: int | None) -> None:
        """Does nothing: an epoch leaves a few hundred bytes a rank there, until that process ends."""


# Between an epoch in which no step succeeded and the next one.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
# When a rank's collective has failed, the rank that is the cause gets so long to show: a death is seen in milliseconds.
_CAUSE_WAIT_S = 1.0


class Epochs:
    """The epoch in force, or the one that was last. Times are monotonic seconds."""

    def __init__(self, rendezvous: Rendezvous | None = None) -> None:
        """rendezvous: None if the ranks need none, or others say where."""
        self._rendezvous = rendezvous
        # Where its ranks meet; empty if they don't.
        self.address = ""
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
        self.cause_wait_ends = math.inf
        # Seconds that the next one has to wait for; 0: a step of this one has returned.
        self.pause = 0.0
        self._next_at = 0.0

    def next_check(self, now: float) -> float:
        """When it should be looked at again, if nothing happens; infinite if it need not be."""
        may_begin_at = self._next_at if not self.is_open and self._next_at > now else math.inf
        return min(may_begin_at, self.cause_wait_ends)

    def may_begin(self, now: float) -> bool:
        return not self.is_open and now >= self._next_at

    def next_address(self, store_address: str) -> str:
        """Where the ranks of the next one meet. store_address: of the first rank's Hello."""
        return "" if self._rendezvous is None else self._rendezvous.address(self.number + 1, store_address)

    def begin(self, number: int, address: str = "") -> None:
        """number: above those before. address: where its ranks meet."""
        assert not self.is_open, f"epoch {self.number} has not ended"
        assert number > self.number, f"epoch {number} after {self.number}"
        self.number, self.address = number, address
        self.is_open = True
        self.pause = min(max(2 * self.pause, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
        log.info("epoch %d begins", self.number)

    def pass_over(self, number: int, cause: str) -> None:
        """That one took place without the ranks of this replica."""
        assert not self.is_open, f"epoch {self.number} has not ended"
        assert number > self.number, f"epoch {number} after {self.number}"
        self.number, self.cause = number, cause

    def become_ready(self) -> bool:
        """Returns whether the one that was ready before it was ended by ranks that failed, or have died."""
        self.is_ready = True
        if self._rendezvous is not None:
            self._rendezvous.remove_all_but(self.number)
        has_failed, self._has_failed = self._has_failed, False
        self._lost_instances.clear()
        return has_failed

    def note_success(self) -> None:
        """A step has returned."""
        self.pause = 0.0

    def close(self) -> None:
        """No rank comes to a rendezvous any more."""
        if self._rendezvous is not None:
            self._rendezvous.remove_all_but(None)

    def end(self, cause: str, *, has_failed: bool = False, lost_instances: Collection[int] = ()) -> bool:
        """True if it was ready: what its ranks held is lost.

        has_failed: by what ranks did. lost_instances: of the ranks that may have died, which is not known yet.
        """
        if not self.is_open:
            return False
        self.is_open, self.cause = False, cause
        self._consequence, self.cause_wait_ends = "", math.inf
        # The first time at once; then the pauses grow until a step succeeds.
        self._next_at = time.monotonic() + (self.pause if self.pause > _FIRST_PAUSE_S else 0.0)
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
        self._consequence, self.cause_wait_ends = consequence, now + _CAUSE_WAIT_S
        return True

    def unexplained(self, now: float) -> str:
        """A consequence whose cause has not shown in time; empty if there is none."""
        return self._consequence if now >= self.cause_wait_ends else ""
