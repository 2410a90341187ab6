"""Ports for servers that a test or a benchmark starts: none that another process of them may pick at the same time.

Outgoing connections take their ports from the kernel's ephemeral range (32768 and up on Linux), so that a port picked
there may be taken before the server listens. These are below, and each process has a slice of them to itself.
"""

import fcntl
import functools
import os
import socket
import tempfile
from contextlib import ExitStack
from pathlib import Path

_FIRST, _SLICE, _NUM_SLICES = 10_000, 200, 50


def free_port() -> int:
    return free_ports(1)


def free_ports(count: int) -> int:
    """The first of `count` adjacent ports on which nothing listens, and that this process has not picked lately.

    Raises RuntimeError if there are none.
    """
    ports = _ports()
    for _ in range(_SLICE):
        first = ports.take(count)
        if _are_free(range(first, first + count)):
            return first
    raise RuntimeError(f"no {count} adjacent free ports between {ports.first} and {ports.first + _SLICE}")


class _Slice:
    """The ports of one process, taken in turn."""

    def __init__(self, index: int) -> None:
        self.first = _FIRST + index * _SLICE
        self._next = 0

    def take(self, count: int) -> int:
        if self._next + count > _SLICE:
            self._next = 0
        first = self.first + self._next
        self._next += count
        return first


@functools.cache
def _ports() -> _Slice:
    """Claims a slice for as long as this process lives, by a lock on a file."""
    directory = Path(tempfile.gettempdir()) / f"octavo-test-ports-{os.getuid()}"
    directory.mkdir(exist_ok=True)
    for index in range(_NUM_SLICES):
        file = os.open(directory / str(index), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            continue
        return _Slice(index)
    raise RuntimeError(f"{_NUM_SLICES} processes hold ports; their locks are in {directory}")


def _are_free(ports: range) -> bool:
    with ExitStack() as held:
        try:
            for port in ports:
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
