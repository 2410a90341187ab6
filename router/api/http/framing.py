"""Bounds what it costs to take a connection's bytes apart, however its sender cuts them up.

Each read, TLS record and chunk of a body costs its own work, whatever its size: a body in chunks of one byte took 50
times the processor time of the same body in one (benchmarks/router/harm/framing.py). So pieces are counted, and a
connection whose pieces are many and tiny ends.
"""

import asyncio
import socket
import time
from typing import Any

# A connection may have this many pieces of any size, one more for so many bytes on the wire, and more for each request,
# which costs as much as hundreds. Chunks of 128 bytes cost up to three times as much a byte as large ones; a TLS record
# costs as much as three chunks.
FREE_PIECES, BYTES_A_PIECE, PIECES_A_REQUEST = 1024, 128, 16
PIECES_A_RECORD = 3
# The most that one read takes, so that one connection's bytes hold the event loop only so long.
READ_BYTES = 65_536
# Seconds in which a turn of the event loop begins reads. What is not read then waits for the next turn, behind all
# that has been going on.
READS_S = 0.002
# A TLS record's header: its type, version, and length in two bytes (RFC 8446, 5.1).
_RECORD_HEADER = 5


class AbsurdFraming(ConnectionAbortedError):
    """Raised for a connection whose pieces are many and tiny."""


class Framing:
    """Counts the pieces and bytes of one connection."""

    __slots__ = ("num_bytes", "num_pieces")

    def __init__(self) -> None:
        self.num_pieces = self.num_bytes = 0

    def add(self, num_pieces: int, num_bytes: int = 0) -> None:
        """Counts them. Raises AbsurdFraming."""
        self.num_pieces += num_pieces
        self.num_bytes += num_bytes
        if self.num_pieces > FREE_PIECES + self.num_bytes // BYTES_A_PIECE:
            raise AbsurdFraming(
                f"{self.num_bytes} bytes came in {self.num_pieces} pieces (segments, TLS records or chunks): send at "
                f"least {BYTES_A_PIECE} bytes in each"
            )


class Turns:
    """Bounds the time that the reads of all connections take in one turn of the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        # When this turn's first read began; 0: there was none.
        self._began = 0.0

    def enter(self) -> None:
        """Raises BlockingIOError if no read may begin: asyncio calls again in the next turn."""
        now = time.perf_counter()
        if not self._began:
            self._began = now
            self._loop.call_soon(self._end)
        elif now - self._began > READS_S:
            raise BlockingIOError

    def _end(self) -> None:
        self._began = 0.0


class CountedSocket(socket.socket):
    """A connected socket that counts what it reads, and reads at most READ_BYTES at once.

    asyncio takes an OSError of a read, as AbsurdFraming is, as the end of the connection, and logs nothing.
    """

    framing: Framing
    turns: Turns
    # Bytes of the TLS record that has begun and not come yet, and its header as far as it has come.
    _left = 0
    _header: bytearray

    @classmethod
    def of(cls, connected: socket.socket, framing: Framing, turns: Turns) -> "CountedSocket":
        """Takes a socket's place."""
        counted = cls(fileno=connected.detach())
        counted.framing, counted.turns, counted._header = framing, turns, bytearray()
        return counted

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        """Reads plain bytes. Does not raise AbsurdFraming: the protocol, which parses them, does."""
        self.turns.enter()
        data = super().recv(min(bufsize, READ_BYTES), flags)
        self.framing.num_pieces += 1
        self.framing.num_bytes += len(data)
        return data

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Reads TLS records, before they are decrypted. Raises AbsurdFraming."""
        self.turns.enter()
        size = super().recv_into(buffer, min(nbytes or len(buffer), READ_BYTES), flags)
        self.framing.add(1 + PIECES_A_RECORD * self._count_records(memoryview(buffer)[:size]), size)
        return size

    def _count_records(self, data: memoryview) -> int:
        """Returns how many records begin in these bytes."""
        header, at, count = self._header, self._left, 0
        while at < len(data):
            taken = data[at : at + _RECORD_HEADER - len(header)]
            header += taken
            at += len(taken)
            if len(header) == _RECORD_HEADER:
                at += int.from_bytes(header[3:])
                header.clear()
                count += 1
        self._left = at - len(data)
        return count
