"""What is fuzzed, and what must hold while it is."""

import asyncio
import gc
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Protocol

import psutil

# What a process may take more after all messages than after the first ones, in MiB: caches fill, allocators keep. While
# it reads a message it may hold that, too.
MEMORY_BOUND_MIB = 64
# The longest that one message may take. Well below any timeout, far above what any took.
LONGEST_S = 5.0
_MEASURED_EVERY = 500
_WARM_UP = 0.1


class Edge(Protocol):
    """One way in, open. Messages are bytes, so that each can be kept in a file."""

    def malformed(self, random: Random) -> bytes:
        """The next message."""
        ...

    async def feed(self, message: bytes) -> str:
        """Gives it to the code that reads it; in a word, what became of it. Raises what no message may bring about."""
        ...

    async def check(self) -> None:
        """A good message still gets what it should, and nothing has been left behind. Raises AssertionError."""
        ...


# A directory of its own -> the edge, for as long as the context lasts.
Opened = Callable[[Path], AbstractAsyncContextManager[Edge]]


class MessageFailed(Exception):
    """From Edge.feed, where it was not the last message that failed but this one, and its cause."""

    def __init__(self, message: bytes) -> None:
        super().__init__(message)
        self.message = message


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """largest_mib: what messages on their way take, unpacked, if they are large; here lie both what is sent and what is
    read of it."""

    name: str
    reads: str
    opened: Opened
    largest_mib: int = 0


@dataclass(slots=True, kw_only=True)
class Outcome:
    """failure: empty if all was well; message: the one at which it was not."""

    edge: str
    seed: int
    num_messages: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    # After the first tenth, the most that it was later, and at the end.
    rss_mib: float = 0.0
    peak_mib: float = 0.0
    last_mib: float = 0.0
    became: Counter[str] = field(default_factory=Counter)
    failure: str = ""
    message: bytes = b""


async def fuzz(kind: Kind, edge: Edge, num_messages: int, seed: int) -> Outcome:
    """Feeds messages until one fails."""
    outcome = Outcome(edge=kind.name, seed=seed)
    random, process = Random(f"{seed}/{kind.name}"), psutil.Process()
    began = time.monotonic()
    try:
        await edge.check()
        for index in range(num_messages):
            outcome.message = edge.malformed(random)
            since = time.monotonic()
            async with asyncio.timeout(LONGEST_S):
                outcome.became[await edge.feed(outcome.message)] += 1
            outcome.slowest_s = max(outcome.slowest_s, time.monotonic() - since)
            outcome.num_messages = index + 1
            if index % _MEASURED_EVERY == 0:
                _measure(outcome, process, is_warm=index >= _WARM_UP * num_messages)
        await edge.check()
        gc.collect()
        _measure(outcome, process, is_warm=True)
        _judge(outcome, MEMORY_BOUND_MIB, MEMORY_BOUND_MIB + kind.largest_mib)
    except Exception as raised:  # noqa: BLE001 - whatever it is, it is what is looked for
        error: BaseException = raised
        if isinstance(raised, MessageFailed) and raised.__cause__ is not None:
            error, outcome.message = raised.__cause__, raised.message
        outcome.failure = f"{type(error).__name__}: {error}" + _origin(error)
    outcome.seconds = time.monotonic() - began
    if not outcome.failure:
        outcome.message = b""
    return outcome


def _measure(outcome: Outcome, process: psutil.Process, *, is_warm: bool) -> None:
    used = outcome.last_mib = process.memory_info().rss / 2**20
    if is_warm and outcome.rss_mib:
        outcome.peak_mib = max(outcome.peak_mib, used)
    else:
        outcome.rss_mib = outcome.peak_mib = used


def _judge(outcome: Outcome, lasting_mib: float, passing_mib: float) -> None:
    """Raises AssertionError."""
    lasting, passing = (mib - outcome.rss_mib for mib in (outcome.last_mib, outcome.peak_mib))
    assert lasting <= lasting_mib, f"memory has grown by {lasting:.0f} MiB, more than {lasting_mib}"
    assert passing <= passing_mib, f"memory had grown by {passing:.0f} MiB, more than {passing_mib}"
    assert outcome.slowest_s <= LONGEST_S, f"a message took {outcome.slowest_s:.1f} s, more than {LONGEST_S:g}"


def _origin(error: BaseException) -> str:
    """Where it was raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return ""
    return f" (at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})"
