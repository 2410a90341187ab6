"""The interface of a fuzzed edge, and the run that feeds it and checks its limits."""

import asyncio
import ctypes
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

# How much more memory, in MiB, a process may hold after all messages than after the first tenth: caches fill, and
# allocators keep freed memory. While it reads messages, it may also hold Kind.largest_mib.
MEMORY_BOUND_MIB = 64
# The longest that one message may take: well below any timeout, far above any measured time.
LONGEST_S = 5.0
_MEASURED_EVERY = 500
_WARM_UP = 0.1


class Edge(Protocol):
    """An open way into a process. Messages are bytes, so that each can be saved to a file."""

    def malformed(self, random: Random) -> bytes:
        """Makes the next message."""
        ...

    async def feed(self, message: bytes) -> str:
        """Gives the message to its reader; returns a word for the result. Raises errors that no message may cause."""
        ...

    async def check(self) -> None:
        """Checks that a good message still gets its answer, and that nothing is left over. Raises AssertionError."""
        ...


# Opens an edge in a directory of its own; it stays open as long as the context lasts.
Opened = Callable[[Path], AbstractAsyncContextManager[Edge]]


class MessageFailed(Exception):
    """Raised by Edge.feed if an earlier message failed, not the one just fed; __cause__ is that message's error."""

    def __init__(self, message: bytes) -> None:
        super().__init__(message)
        self.message = message


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of edge. largest_mib: memory of large messages in flight, unpacked; this process holds both what is sent
    and what is read of it. most_held_s: the longest that the event loop may be held, which an edge measures as its
    `most_held_s`; 0: it measures nothing. kept_mib: freed memory that the allocator keeps of them."""

    name: str
    reads: str
    opened: Opened
    largest_mib: int = 0
    most_held_s: float = 0.0
    kept_mib: int = 0


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The result for one edge. failure: empty if there was none; message: the one that failed."""

    edge: str
    seed: int
    num_messages: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    # The longest that the event loop was held, the client's work included, where it is measured.
    most_held_s: float = 0.0
    # Memory after the first tenth, at its later peak, and at the end.
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
        lasting_mib = MEMORY_BOUND_MIB + kind.kept_mib
        _judge(outcome, lasting_mib, lasting_mib + kind.largest_mib)
    except Exception as raised:  # noqa: BLE001 - any error is a finding
        error: BaseException = raised
        if isinstance(raised, MessageFailed) and raised.__cause__ is not None:
            error, outcome.message = raised.__cause__, raised.message
        outcome.failure = f"{type(error).__name__}: {error}" + _origin(error)
    outcome.most_held_s = getattr(edge, "most_held_s", 0.0)
    outcome.seconds = time.monotonic() - began
    if not outcome.failure:
        outcome.message = b""
    return outcome


def _measure(outcome: Outcome, process: psutil.Process, *, is_warm: bool) -> None:
    # Returns freed memory to the system: it is no growth.
    ctypes.CDLL(None).malloc_trim(0)
    used = outcome.last_mib = process.memory_info().rss / 2**20
    if is_warm and outcome.rss_mib:
        outcome.peak_mib = max(outcome.peak_mib, used)
    else:
        outcome.rss_mib = outcome.peak_mib = used


def _judge(outcome: Outcome, lasting_mib: float, passing_mib: float) -> None:
    """Raises AssertionError if memory or time is over its bound."""
    lasting, passing = (mib - outcome.rss_mib for mib in (outcome.last_mib, outcome.peak_mib))
    assert lasting <= lasting_mib, f"memory has grown by {lasting:.0f} MiB, more than {lasting_mib}"
    assert passing <= passing_mib, f"memory had grown by {passing:.0f} MiB, more than {passing_mib}"
    assert outcome.slowest_s <= LONGEST_S, f"a message took {outcome.slowest_s:.1f} s, more than {LONGEST_S:g}"


def _origin(error: BaseException) -> str:
    """The file and line where an error was raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return ""
    return f" (at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})"
