"""Ranks that compute steps together, as with worker.parallel, but over a unix socket and without torch."""

import contextlib
import select
import socket
import struct
import time
from collections.abc import Callable

from worker.errors import CollectiveError

_PAUSE_S = 0.005
_NUMBER = struct.Struct("<Q")


class SocketGroup:
    """Rank 0 receives a number from each other rank, then sends them the sum."""

    def __init__(self, rank: int, others: list[socket.socket]) -> None:
        """others: connections; at rank 0 to each other rank, at others to rank 0."""
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
        # No rank continues before all have connected.
        self._send(0)

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

    def meet_in_step(self, step: int, num_tokens: int) -> int:
        """Waits until all ranks are in the step; returns the sum of their tokens. Raises CollectiveError if one has
        gone."""
        try:
            if self.rank == 0:
                num_tokens += self._receive()
                self._send(num_tokens)
                return num_tokens
            self._send(num_tokens)
            return self._receive()
        except OSError as error:
            raise CollectiveError(
                f"a collective of step {step} failed at rank {self.rank}, for another rank has died: {error}"
            ) from error

    def leave(self) -> None:
        for other in self._others:
            # Also wakes a thread that waits on it.
            with contextlib.suppress(OSError):
                other.shutdown(socket.SHUT_RDWR)
            other.close()

    def _send(self, number: int) -> None:
        for other in self._others:
            other.sendall(_NUMBER.pack(number))

    def _receive(self) -> int:
        """The sum of one number from each."""
        total = 0
        for other in self._others:
            number = other.recv(_NUMBER.size, socket.MSG_WAITALL)
            if len(number) < _NUMBER.size:
                raise ConnectionResetError("the other end has closed")
            total += _NUMBER.unpack(number)[0]
        return total


def meet(address: str, rank: int, world_size: int, while_waiting: Callable[[], None]) -> SocketGroup:
    """Stands in for worker.parallel.group_init.meet: "file:PATH" becomes rank 0's socket. Raises CollectiveError, and
    what while_waiting raises."""
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
