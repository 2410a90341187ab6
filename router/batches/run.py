"""Computes the lines of a batch, some at once, and keeps each answer before its line counts as done."""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from router.batches.answers import answer_line, is_success, line_id, problem_line
from router.batches.journal import Journal
from router.batches.lines import Line, LineReader, Problem

# Sends a request to url, with a body and a request id; returns the answer's status and body.
Send = Callable[[str, bytes, str], Awaitable[tuple[int, bytes]]]
# Bytes of lines that are held at once, but for one line alone.
_HELD_BYTES = 2**26
# Answers whose line is encoded on the event loop.
_SMALL_BYTES = 2**18


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
        on_line: Callable[[bool], None] = lambda succeeded: None,
        is_own: bool = False,
    ) -> None:
        """answers, problems: for the output lines of requests that succeed and of others; may be the same one.
        refusal: lines get this problem instead of an answer. on_line: called after each line that is kept, with
        whether its request succeeded. is_own: this process answers."""
        self._key, self._reader, self._answers, self._problems = key, reader, answers, problems
        self._send, self._concurrency, self._refusal, self._on_line = send, concurrency, refusal, on_line
        self._is_own = is_own
        self._reading = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "batch-lines")
        self._held, self._room = 0, asyncio.Condition()
        self._is_leaving = False

    async def run(self) -> bool:
        """Returns False if `leave` has ended it before all lines were done.

        Raises JournalError, OSError, and what `send` raises.
        """
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
        return not self._is_leaving

    def leave(self) -> None:
        """Takes no more lines; those that are being computed end first."""
        self._is_leaving = True

    async def _work(self) -> None:
        while (line := await self._next()) is not None:
            try:
                succeeded = await self._compute(line)
            finally:
                await self._give_back(len(line.body))
            self._on_line(succeeded)

    async def _next(self) -> Line | None:
        async with self._reading:
            while not self._is_leaving:
                line = await asyncio.get_running_loop().run_in_executor(self._thread, self._reader.next)
                if line is None:
                    return None
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
        """Returns whether the request succeeded."""
        problem = line.problem or self._refusal
        if problem is not None:
            written = problem_line(self._key, line, problem)
            await self._problems.append(written, line.number, is_success=False)
            return False
        status, body = await self._send(line.url, line.body, line_id(self._key, line.number))
        journal = self._answers if is_success(status) else self._problems
        encode = functools.partial(answer_line, self._key, line, status, body, is_own=self._is_own)
        written = encode() if len(body) <= _SMALL_BYTES else await asyncio.to_thread(encode)
        await journal.append(written, line.number, is_success=is_success(status))
        return is_success(status)
