"""Ranks that compute steps together, as worker.parallel does it, but without torch: over a unix socket."""

import contextlib
import select
import socket
import time
from collections.abc import Callable

from worker.errors import CollectiveError

_PAUSE_S = 0.005


class SocketGroup:
    """Rank 0 hears of all others that they are there, then tells them to go on."""

    def __init__(self, rank: int, others: list[socket.socket]) -> None:
        """others: connections, at rank 0 to each other rank, elsewhere to rank 0."""
        self.rank, self._others = rank, others

    def accept(self, path: str, num_others: int, while_waiting: Callable[[], None]) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(num_others)
            listener.settimeout(_PAUSE_S)
            while len(self._others) < num_others:
                while_waiting()
                with contextlib.suppress(TimeoutError):
                    self._others.append(listener.accept()[0])
        for other in self._others:
            other.setblocking(True)
        # Nobody goes on before all are there.
        self._send()

    def connect(self, path: str, while_waiting: Callable[[], None]) -> None:
        first = socket.socket(socket.AF_UNIX)
        self._others.append(first)
        while first.connect_ex(path):
            while_waiting()
            time.sleep(_PAUSE_S)
        while not select.select([first], [], [], _PAUSE_S)[0]:
            while_waiting()
        try:
            self._receive()
        except OSError as error:
            raise CollectiveError(f"rank {self.rank} cannot connect with the others: {error}") from error

    def meet_in_step(self, step: int) -> None:
        """Waits until all ranks are in the step. Raises CollectiveError once one of them can't come any more."""
        try:
            if self.rank == 0:
                self._receive()
                self._send()
            else:
                self._send()
                self._receive()
        except OSError as error:
            raise CollectiveError(
                f"a collective of step {step} failed at rank {self.rank}, for another rank has died: {error}"
            ) from error

    def leave(self) -> None:
        for other in self._others:
            # Wakes a thread that waits in there, too.
            with contextlib.suppress(OSError):
                other.shutdown(socket.SHUT_RDWR)
            other.close()

    def _send(self) -> None:
        for other in self._others:
            other.sendall(b"x")

    def _receive(self) -> None:
        for other in self._others:
            if not other.recv(1):
                raise ConnectionResetError("the other end has closed")


def meet(address: str, rank: int, world_size: int, while_waiting: Callable[[], None]) -> SocketGroup:
    """As worker.parallel.rendezvous.meet: "file:PATH" becomes rank 0's socket. Raises CollectiveError, and what
    while_waiting raises."""
    path = address.removeprefix("file:")
    group = SocketGroup(rank, [])
    try:
        if rank == 0:
            group.accept(path, world_size - 1, while_waiting)
        else:
            group.connect(path, while_waiting)
    except BaseException:
        group.leave()
        raise
    return group
