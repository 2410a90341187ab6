"""Computes the lines of a batch, some at once, and keeps each answer before its line counts as done."""

import asyncio
import enum
import functools
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from router.batches.answers import answer_line, is_success, line_id, problem_line
from router.batches.journal import Journal
from router.batches.lines import Line, LineReader, Problem
from router.batches.sending import PutOff, SendingError

log = logging.getLogger("octavo.router.batches")

# Sends a request to url, with a body and a request id; returns the answer's status and body.
Send = Callable[[str, bytes, str], Awaitable[tuple[int, bytes]]]
# Bytes of lines that are held at once, but for one line alone.
_HELD_BYTES = 2**26
# Answers whose line is encoded on the event loop.
_SMALL_BYTES = 2**18


class PassEnd(enum.Enum):
    """ALL_DONE: each line has its output. LINES_LEFT: some were put off, another pass may compute them. LEFT: `leave`
    has ended the pass."""

    ALL_DONE = enum.auto()
    LINES_LEFT = enum.auto()
    LEFT = enum.auto()


@dataclass(slots=True)
class Later:
    """Lines that were put off, over the passes of a batch. All others go first. settle_s: seconds from a line's first
    time until its last refusal may be its answer."""

    settle_s: float = 0.0
    # A line's number; when it was first put off, and how many lines had been answered by then.
    numbers: dict[int, tuple[float, int]] = field(default_factory=dict)
    # Those that have had their turn, until all others have had theirs.
    done: set[int] = field(default_factory=set)
    num_answered: int = 0
    # Why the last one was put off.
    reason: str = ""

    def note(self, number: int, reason: str) -> None:
        self.numbers.setdefault(number, (asyncio.get_running_loop().time(), self.num_answered))
        self.done.add(number)
        self.reason = reason

    def is_settled(self, number: int) -> bool:
        """Tells whether the server has answered others since a line was put off, long enough ago."""
        since, num_before = self.numbers.get(number, (float("inf"), 0))
        return asyncio.get_running_loop().time() >= since + self.settle_s and self.num_answered > num_before


class _NoAnswer(Exception):
    """The server ends the connection of this line's request each time."""


class BatchRun:
    """One pass over a batch's lines. Lines that its journals have are left out."""

    def __init__(
        self,
        key: str,
        reader: LineReader,
        answers: Journal,
        problems: Journal,
        send: Send,
        *,
        concurrency: int,
        refusal: Problem | None = None,
        later: Later | None = None,
        on_line: Callable[[bool], None] = lambda succeeded: None,
        is_own: bool = False,
    ) -> None:
        """answers, problems: for the output lines of requests that succeed and of others; may be the same one.
        refusal: lines get this problem instead of an answer. later: the same for each pass. on_line: called after each
        line that is kept, with whether its request succeeded. is_own: this process answers."""
        self._key, self._reader, self._answers, self._problems = key, reader, answers, problems
        self._send, self._concurrency, self._refusal, self._on_line = send, concurrency, refusal, on_line
        self._is_own = is_own
        self._reading = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "batch-lines")
        self._held, self._room = 0, asyncio.Condition()
        self._later = Later() if later is None else later
        self._is_leaving = self._is_at_end = False
        # Lines put off one after another, without an answer in between.
        self._num_put_off = 0

    async def run(self) -> PassEnd:
        """Raises JournalError, OSError, and SendingError if `send` does."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._concurrency):
                    group.create_task(self._work())
        except* Exception as errors:  # noqa: BLE001
            # The first one says why; others follow from it.
            raise errors.exceptions[0] from None
        finally:
            # Reading a line ends soon, and the caller closes the file.
            await asyncio.to_thread(self._thread.shutdown)
        if self._is_leaving:
            return PassEnd.LEFT
        if self._is_at_end:
            are_left = any(number not in self._answers and number not in self._problems for number in self._later.done)
            self._later.done.clear()
            return PassEnd.LINES_LEFT if are_left else PassEnd.ALL_DONE
        return PassEnd.LINES_LEFT

    def leave(self) -> None:
        """Takes no more lines; those that are being computed end first."""
        self._is_leaving = True

    async def _work(self) -> None:
        while (line := await self._next()) is not None:
            try:
                succeeded = await self._compute(line)
            except PutOff as error:
                self._later.note(line.number, str(error))
                self._num_put_off += 1
                continue
            finally:
                await self._give_back(len(line.body))
            self._on_line(succeeded)

    @property
    def _is_stuck(self) -> bool:
        """Nobody is answered: another batch, or another time, may have more luck."""
        return self._num_put_off >= self._concurrency

    async def _next(self) -> Line | None:
        async with self._reading:
            while not self._is_leaving and not self._is_stuck:
                line = await asyncio.get_running_loop().run_in_executor(self._thread, self._reader.next)
                if line is None:
                    self._is_at_end = True
                    return None
                if line.number in self._later.done:
                    continue
                if line.number not in self._answers and line.number not in self._problems:
                    await self._take(len(line.body))
                    return line
            return None

    async def _take(self, num_bytes: int) -> None:
        async with self._room:
            await self._room.wait_for(lambda: not self._held or self._held + num_bytes <= _HELD_BYTES)
            self._held += num_bytes

    async def _give_back(self, num_bytes: int) -> None:
        async with self._room:
            self._held -= num_bytes
            self._room.notify_all()

    async def _compute(self, line: Line) -> bool:
        """Returns whether the request succeeded. Raises PutOff, JournalError, SendingError."""
        problem = line.problem or self._refusal
        if problem is None:
            try:
                status, written = await self._answer(line)
            except (PutOff, SendingError):
                raise
            except asyncio.CancelledError:
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise
                # What computes the line was cancelled, not the batch.
                problem = Problem("cancelled", "the request was cancelled while it was computed")
            except _NoAnswer as error:
                problem = Problem("no_answer", str(error))
            except Exception as error:
                # Whatever a line makes its request raise is that line's error.
                log.exception("line %d of a batch failed", line.number)
                problem = Problem("internal_error", f"the request failed unexpectedly: {type(error).__name__}")
            else:
                self._later.num_answered += 1
                self._num_put_off = 0
                journal = self._answers if is_success(status) else self._problems
                await journal.append(written, line.number, is_success=is_success(status))
                return is_success(status)
        await self._problems.append(problem_line(self._key, line, problem), line.number, is_success=False)
        return False

    async def _answer(self, line: Line) -> tuple[int, bytes]:
        """Returns the status of a line's answer, and its output line. Raises PutOff, and anything else."""
        try:
            status, body = await self._send(line.url, line.body, line_id(self._key, line.number))
        except PutOff as error:
            # The server answers others, and has refused this one in two passes: it is the line's own doing.
            if not (error.is_its_own and self._later.is_settled(line.number)):
                raise
            if error.answer is None:
                raise _NoAnswer(str(error)) from None
            status, body = error.answer
        encode = functools.partial(answer_line, self._key, line, status, body, is_own=self._is_own)
        return status, encode() if len(body) <= _SMALL_BYTES else await asyncio.to_thread(encode)
