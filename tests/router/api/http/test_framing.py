"""router.api.http.framing: connections share the reads of a turn of the event loop. A clock and a loop of its own."""

import asyncio
import gc
import socket
from collections.abc import Callable
from typing import Any

import pytest

from router.api.http import framing
from router.api.http.connection import Connection
from router.api.http.framing import (
    CROWDED_BYTES,
    CROWDED_PIECES,
    READ_BYTES,
    READS_S,
    CountedSocket,
    Framing,
    ReadTurns,
)
from tests.support.http_connections import WAIT_S, sent, serving


class Loop:
    """Visits connections in the same order in each turn, as epoll does; a read takes `read_s`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, read_s: float) -> None:
        self._now, self._read_s = 1.0, read_s
        self._later: list[Callable[[], None]] = []
        monkeypatch.setattr(framing.time, "perf_counter", lambda: self._now)
        self.turns = ReadTurns(self)  # type: ignore[arg-type]
        # The round of each connection's last read, and its number of reads.
        self.rounds: dict[str, int] = {}
        self.reads: dict[str, int] = {}

    def call_soon(self, call: Callable[[], None]) -> None:
        self._later.append(call)

    def add(self, *names: str) -> None:
        for name in names:
            self.rounds[name], self.reads[name] = self.turns.first_round(), 0

    def turn(self, *names: str) -> None:
        for name in names or tuple(self.rounds):
            try:
                self.rounds[name] = self.turns.enter(self.rounds[name])
            except BlockingIOError:
                continue
            self.reads[name] += 1
            self._now += self._read_s
        later, self._later = self._later, []
        for call in later:
            call()


def test_the_last_of_many_connections_reads_as_often_as_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the event loop's first ones had all the time of each turn, and a ping beside them waited for seconds."""
    loop = Loop(monkeypatch, 0.6 * READS_S)
    loop.add(*"abcdefgh")
    for _ in range(40):
        loop.turn()
    assert sum(loop.reads.values()) >= 80
    assert max(loop.reads.values()) - min(loop.reads.values()) <= 1
    assert loop.turns.is_crowded


def test_a_round_ends_when_those_that_have_yet_to_read_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch, 1.5 * READS_S)
    loop.add(*"abc")
    loop.turn()
    assert loop.reads == {"a": 1, "b": 0, "c": 0}
    loop.turn("a")
    loop.turn("a")
    assert loop.reads["a"] == 2


def test_connections_read_in_every_turn_that_has_time_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch, READS_S / 100)
    loop.add(*"abcdefgh")
    for _ in range(10):
        loop.turn()
    assert set(loop.reads.values()) == {10}
    assert not loop.turns.is_crowded


def test_new_connections_do_not_keep_old_ones_from_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch, 1.5 * READS_S)
    loop.add("old")
    for number in range(60):
        loop.add(f"new {number}", f"newer {number}")
        # New ones come first, read once and go.
        loop.turn(*(name for name, count in loop.reads.items() if name != "old" and not count), "old")
        if loop.reads["old"] == 3:
            break
    assert loop.reads["old"] == 3


@pytest.mark.parametrize(
    ("num_pieces", "num_bytes", "expected"),
    [(0, 0, CROWDED_BYTES), (1000, 6000, CROWDED_BYTES), (10, 4000, 400 * CROWDED_PIECES), (2, 131_072, READ_BYTES)],
)
def test_a_read_in_a_crowd_takes_so_many_pieces(num_pieces: int, num_bytes: int, expected: int) -> None:
    class Crowd(ReadTurns):
        def __init__(self) -> None:
            self._round, self.is_crowded = 1, True

    here, there = socket.socketpair()
    with here, CountedSocket.of(there, counts := Framing(), Crowd()) as counted:
        counts.num_pieces, counts.num_bytes = num_pieces, num_bytes
        assert counted._most_bytes() == expected
        counted.turns.is_crowded = False
        assert counted._most_bytes() == READ_BYTES


async def test_an_ended_connection_leaves_no_circle_of_references() -> None:
    """Circles wait for a collection of all garbage: those of some hundred connections held the event loop for 0.1 s."""

    def alive() -> list[Any]:
        return [each for each in gc.get_objects() if type(each) is Connection]

    async with serving() as (_, port):
        before = len(alive())
        gc.collect()
        gc.disable()
        try:
            for request in (b"GET /ping HTTP/1.0\r\n\r\n", b"nonsense\r\n\r\n", b"POST /size HTTP/1.1\r\n" * 2):
                await sent(port, request)
            async with asyncio.timeout(WAIT_S):
                # A refused one lingers.
                while len(alive()) > before:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        finally:
            gc.enable()
