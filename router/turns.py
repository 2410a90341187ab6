"""Whose turn it is to write to its client."""

import asyncio
from collections import deque

# Few enough that a replica's next message is read within a millisecond or two, whoever has something to write.
_WRITERS_A_TURN = 16


class Turns:
    """Wakes writers in the order in which they asked, a few in each turn of the event loop.

    To write a message costs ten times what it costs to take a token in. Were all streams of a step woken at once, the
    next step would be read when all have written; with more streams than can be written to in the time of a step, steps
    would wait for ever longer, and each token still leave in a message of its own. As it is, steps are always read in
    time, and a stream that waits its turn gathers the tokens of several: messages become as large as the load asks for,
    and no stream waits longer than it takes to write to each of the others once.
    """

    def __init__(self) -> None:
        self._asked: deque[asyncio.Future[None]] = deque()
        self._is_due = False

    def ask(self, turn: asyncio.Future[None]) -> None:
        """`turn` is resolved when it has come; one that is cancelled meanwhile costs no turn."""
        self._asked.append(turn)
        if not self._is_due:
            self._is_due = True
            turn.get_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        num_woken = 0
        while self._asked and num_woken < _WRITERS_A_TURN:
            turn = self._asked.popleft()
            if not turn.done():
                turn.set_result(None)
                num_woken += 1
        self._is_due = bool(self._asked)
        if self._is_due:
            self._asked[0].get_loop().call_soon(self._next_turn)
