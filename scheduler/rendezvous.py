"""Where the ranks of an epoch find each other."""

import logging
from pathlib import Path
from typing import Protocol

from configs.options import Options

log = logging.getLogger("octavo.scheduler")


class Rendezvous(Protocol):
    def address(self, epoch: int, store_address: str) -> str:
        """For step_pb2.Reset. store_address: of the first rank's Hello."""
        ...

    def remove_all_but(self, epoch: int | None) -> None:
        """To be called once all ranks are ready in that epoch; None: once none will come any more."""
        ...


def rendezvous_of(options: Options, replica: int) -> Rendezvous | None:
    """Of the ranks of one replica. None: one rank meets nobody, and in lockstep the coordinator says where."""
    if options.world_size == 1 or options.in_lockstep:
        return None
    return RendezvousStores() if options.meets_over_tcp(replica) else RendezvousFiles(options.runtime_dir, replica)


def common_rendezvous(options: Options) -> Rendezvous:
    """Of the ranks of all replicas, in lockstep."""
    return RendezvousStores() if options.meets_over_tcp(0) else RendezvousFiles(options.runtime_dir, "all")


class RendezvousFiles:
    """A file for each epoch, in a directory that is private: whoever can write it can join the ranks. They make it.

    A file is left alone while a rank may wait at it: a torch.distributed.FileStore whose file has gone waits for it for
    minutes, and hears of no other epoch meanwhile.
    """

    def __init__(self, directory: Path, whose: int | str) -> None:
        """directory: on the machine of all ranks, of mode 0700. whose: the replica, or another name."""
        self._directory, self._prefix = directory.absolute(), f"rendezvous-{whose}-"

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
        """What an epoch leaves there are a few hundred bytes a rank, until that process ends."""
