"""Bounds the cost of parsing a connection's bytes, however its sender splits them.

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
# The most that one read takes, so that one connection's bytes hold the event loop only so long. While connections wait
# for others' reads, one read takes about so many pieces, and at least so many bytes.
READ_BYTES, CROWDED_PIECES, CROWDED_BYTES = 65_536, 64, 512
# Seconds in which a turn of the event loop begins reads. What is not read then waits for the next turn, behind all
# that has been going on.
READS_S = 0.001
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


class ReadTurns:
    """Bounds the time that the reads of all connections take in one turn of the event loop, and shares it out.

    The event loop visits connections in about the same order in each turn, so the last ones would never be read beside
    others that always have bytes. So connections read in rounds, which may take several turns: each one that has bytes
    reads once. A connection that comes in a crowd joins the next round, or new ones would keep a round from its end.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        # True if a connection has had bytes in this turn. When its first read began; 0: there was none.
        self._has_begun, self._read_at = False, 0.0
        self._round = 1
        # True if this turn leaves connections that have yet to read in this round; if an earlier turn did.
        self._is_unfinished = self._is_long = False
        # True if this round or the last one takes more than a turn.
        self.is_crowded = False

    def first_round(self) -> int:
        """Returns what a new connection passes to `enter` first."""
        return self._round if self.is_crowded else self._round - 1

    def enter(self, last_round: int) -> int:
        """Begins a read of a connection that read last in this round, and returns the round of this read. Raises
        BlockingIOError if it may not begin yet: asyncio calls again in the next turn."""
        if not self._has_begun:
            self._has_begun = True
            self._loop.call_soon(self._end)
        if last_round == self._round:
            raise BlockingIOError
        now = time.perf_counter()
        if not self._read_at:
            self._read_at = now
        elif now - self._read_at > READS_S:
            self._is_unfinished = True
            raise BlockingIOError
        return self._round

    def _end(self) -> None:
        self._has_begun, self._read_at = False, 0.0
        self.is_crowded = self._is_long or self._is_unfinished
        if not self._is_unfinished:
            self._round += 1
        self._is_long, self._is_unfinished = self._is_unfinished, False


class CountedSocket(socket.socket):
    """A connected socket that counts what it reads, and reads at most READ_BYTES at once.

    asyncio takes an OSError of a read, as AbsurdFraming is, as the end of the connection, and logs nothing.
    """

    framing: Framing
    turns: ReadTurns
    # The round of its last read.
    _round: int
    # Bytes of the TLS record that has begun and not come yet, and its header as far as it has come.
    _left = 0
    _header: bytearray

    @classmethod
    def of(cls, connected: socket.socket, framing: Framing, turns: ReadTurns) -> "CountedSocket":
        """Takes a socket's place."""
        counted = cls(fileno=connected.detach())
        counted.framing, counted.turns, counted._round, counted._header = (
            framing,
            turns,
            turns.first_round(),
            bytearray(),
        )
        return counted

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        """Reads plain bytes. Does not raise AbsurdFraming: the protocol, which parses them, does."""
        self._round = self.turns.enter(self._round)
        data = super().recv(min(bufsize, self._most_bytes()), flags)
        self.framing.num_pieces += 1
        self.framing.num_bytes += len(data)
        return data

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Reads TLS records, before they are decrypted. Raises AbsurdFraming."""
        self._round = self.turns.enter(self._round)
        size = super().recv_into(buffer, min(nbytes or len(buffer), self._most_bytes()), flags)
        self.framing.add(1 + PIECES_A_RECORD * self._count_records(memoryview(buffer)[:size]), size)
        return size

    def _most_bytes(self) -> int:
        """Returns what the next read may take, by the size of the pieces so far."""
        if not self.turns.is_crowded:
            return READ_BYTES
        framing = self.framing
        expected = CROWDED_PIECES * framing.num_bytes // max(1, framing.num_pieces)
        return min(max(expected, CROWDED_BYTES), READ_BYTES)

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
