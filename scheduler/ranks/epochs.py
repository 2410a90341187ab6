"""Epochs of the ranks: their begin and end, the places where their ranks meet, and the events that report them."""

import logging
import math
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from configs.options import Options
from configs.sampling import MAX_LOGPROBS
from protos import inference_pb2, step_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochBegun:
    """Every rank is ready for plans."""

    epoch: int
    # The model that all ranks agree on; num_blocks is the minimum over the ranks.
    model: inference_pb2.ModelInfo
    # Host blocks for swapped KV, the minimum over the ranks.
    num_swap_blocks: int = 0
    # What all ranks can do (configs.features).
    features: frozenset[str] = frozenset()
    max_logprobs: int = MAX_LOGPROBS
    # True if a rank needs the results of a sequence with a constraint before its next step.
    holds_constrained: bool = False
    # The workers' drafter; empty: none.
    drafter: str = ""
    # Embeddings of items that the workers keep; 0: they take none.
    encoder_cache_size: int = 0
    # True if ranks that failed or died ended the previous epoch, not a broken connection.
    after_failure: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochEnded:
    """The epoch has ended: the KV cache and rows of the ranks are lost."""

    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReturned:
    result: step_pb2.StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemAnswered:
    """A rank has prepared an item; error: or can't, for this reason."""

    rank: int
    number: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fatal:
    """This scheduler can't go on. permanent: a restart would not help (no such model, a corrupt file)."""

    cause: str
    permanent: bool


Event = EpochBegun | EpochEnded | StepReturned | ItemAnswered | Fatal


log = logging.getLogger("octavo.scheduler")


class Rendezvous(Protocol):
    def address(self, epoch: int, store_address: str) -> str:
        """The meeting place of an epoch, for step_pb2.Reset. store_address: from rank 0's Hello."""
        ...

    def remove_all_but(self, epoch: int | None) -> None:
        """Removes the meeting places of all other epochs. Call it once all ranks are ready in `epoch`; with None, once
        no rank will come any more."""
        ...


def rendezvous_of(options: Options, replica: int) -> Rendezvous | None:
    """The rendezvous of one replica's ranks. None for a single rank, and in lockstep, where the coordinator has it."""
    if options.world_size == 1 or options.in_lockstep:
        return None
    return RendezvousStores() if options.meets_over_tcp(replica) else RendezvousFiles(options.runtime_dir, replica)


def common_rendezvous(options: Options) -> Rendezvous:
    """The rendezvous of all replicas' ranks, in lockstep."""
    return RendezvousStores() if options.meets_over_tcp(0) else RendezvousFiles(options.runtime_dir, "all")


class RendezvousFiles:
    """One file per epoch, made by the ranks. The directory is private: a process that can write to it can join them.

    A file must stay while a rank may wait on it: a torch.distributed.FileStore whose file is gone waits for minutes,
    and learns of no other epoch meanwhile.
    """

    def __init__(self, directory: Path, owner: int | str) -> None:
        """directory: has mode 0700; all ranks run on its machine. owner: the replica, or another name."""
        self._directory, self._prefix = directory.absolute(), f"rendezvous-{owner}-"

    def address(self, epoch: int, store_address: str = "") -> str:
        return f"file:{self._path(epoch)}"

    def remove_all_but(self, epoch: int | None) -> None:
        """Removes all other files, including those that an earlier scheduler has left."""
        kept = None if epoch is None else self._path(epoch)
        for path in self._directory.glob(f"{self._prefix}*"):
            if path == kept:
                continue
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                log.warning("cannot remove %s: %s", path, error.strerror)

    def _path(self, epoch: int) -> Path:
        return self._directory / f"{self._prefix}{epoch}"


class RendezvousStores:
    """A store in the process of rank 0, which may change, with its address, from epoch to epoch."""

    def address(self, epoch: int, store_address: str) -> str:
        return f"tcp:{store_address}/{epoch}"

    def remove_all_but(self, epoch: int | None) -> None:
        """Does nothing: an epoch leaves a few hundred bytes per rank there, until that process ends."""


# The pause after an epoch in which no step succeeded.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
# After a rank's collective has failed, the time to wait for the rank that is the cause: a death is seen in
# milliseconds.
_CAUSE_WAIT_S = 1.0


class Epochs:
    """The current epoch, or the last one if none is open. Times are monotonic seconds."""

    def __init__(self, rendezvous: Rendezvous | None = None) -> None:
        """rendezvous: None if the ranks need none, or the coordinator provides it."""
        self._rendezvous = rendezvous
        # The meeting place of its ranks; empty if they don't meet.
        self.address = ""
        # Keeps growing across restarts of the scheduler.
        self.number = int(time.time() * 1000)
        # Its Resets were sent, and it has not ended.
        self.is_open = False
        # All ranks have said Ready, and it has not ended.
        self.is_ready = False
        # True if ranks failed or died since the last ready epoch. A lost rank has died if it comes back as another
        # process; until it does, `_lost_instances` keeps the instances of ranks that may have ended that epoch.
        self._has_failed = False
        self._lost_instances: set[int] = set()
        # Why the last epoch ended.
        self.cause = ""
        # The failure of a rank that another rank has caused, and the time until which the cause may still show up.
        self._consequence = ""
        self.cause_wait_ends = math.inf
        # Seconds of pause before the next epoch; 0 once a step of this one has returned.
        self.pause = 0.0
        self._next_at = 0.0

    def next_check(self, now: float) -> float:
        """The time of the next check if nothing happens; infinite if none is needed."""
        may_begin_at = self._next_at if not self.is_open and self._next_at > now else math.inf
        return min(may_begin_at, self.cause_wait_ends)

    def may_begin(self, now: float) -> bool:
        return not self.is_open and now >= self._next_at

    def next_address(self, store_address: str) -> str:
        """The meeting place of the next epoch. store_address: from rank 0's Hello."""
        return "" if self._rendezvous is None else self._rendezvous.address(self.number + 1, store_address)

    def begin(self, number: int, address: str = "") -> None:
        """Begins an epoch. number: above all earlier ones. address: the meeting place of its ranks."""
        assert not self.is_open, f"epoch {self.number} has not ended"
        assert number > self.number, f"epoch {number} after {self.number}"
        self.number, self.address = number, address
        self.is_open = True
        self.pause = min(max(2 * self.pause, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
        log.info("epoch %d begins", self.number)

    def pass_over(self, number: int, cause: str) -> None:
        """Skips an epoch that took place without the ranks of this replica."""
        assert not self.is_open, f"epoch {self.number} has not ended"
        assert number > self.number, f"epoch {number} after {self.number}"
        self.number, self.cause = number, cause

    def become_ready(self) -> bool:
        """Marks the epoch as ready. True if ranks that failed or died ended the previous ready epoch."""
        self.is_ready = True
        if self._rendezvous is not None:
            self._rendezvous.remove_all_but(self.number)
        has_failed, self._has_failed = self._has_failed, False
        self._lost_instances.clear()
        return has_failed

    def note_success(self) -> None:
        """Ends the pauses between epochs: a step has returned."""
        self.pause = 0.0

    def close(self) -> None:
        """Removes all meeting places: no rank comes any more."""
        if self._rendezvous is not None:
            self._rendezvous.remove_all_but(None)

    def end(self, cause: str, *, has_failed: bool = False, lost_instances: Collection[int] = ()) -> bool:
        """Ends the epoch, if it is open. True if it was ready: the state of its ranks is then lost.

        has_failed: True if a failure of its ranks is the cause. lost_instances: instances of ranks that may have died.
        """
        if not self.is_open:
            return False
        self.is_open, self.cause = False, cause
        self._consequence, self.cause_wait_ends = "", math.inf
        # The first restart comes at once; then pauses grow until a step succeeds.
        self._next_at = time.monotonic() + (self.pause if self.pause > _FIRST_PAUSE_S else 0.0)
        log.warning("epoch %d has ended: %s", self.number, cause)
        was_ready, self.is_ready = self.is_ready, False
        if was_ready:
            self._has_failed, self._lost_instances = has_failed, set(lost_instances)
        return was_ready

    def note_return(self, before: int, instance: int) -> None:
        """Records that a rank is back. instance: its process now; another one than `before` means that the old process
        died."""
        if before in self._lost_instances:
            self._has_failed |= instance != before
            self._lost_instances.discard(before)

    def await_cause(self, consequence: str, now: float) -> bool:
        """Waits for the cause of a rank's failure, which is another rank. True if the caller should look for it: that
        rank may have died, or its message may be on the way."""
        if not self.is_open or self._consequence:
            return False
        self._consequence, self.cause_wait_ends = consequence, now + _CAUSE_WAIT_S
        return True

    def unexplained(self, now: float) -> str:
        """A consequence whose cause has not shown up in time; empty if there is none."""
        return self._consequence if now >= self.cause_wait_ends else ""
