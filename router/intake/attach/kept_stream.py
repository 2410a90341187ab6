"""A stream that goes on when its reader leaves."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

from protos import inference_pb2 as pb
from router.errors import RequestError
from router.intake.intake import Intake
from router.streams.outbox import Outbox
from router.streams.stream import Stream
from router.telemetry.call_context import log_fields

log = logging.getLogger("octavo.router.intake.attach")


class KeptStream:
    """Holds a stream open in a task of its own: until the stream has ended, not until its reader's call has."""

    stream: Stream

    def __init__(self) -> None:
        # None once it is to end.
        self._task: asyncio.Task[None] | None = None
        self._outbox: Outbox | None = None
        self._has_ended = False
        self._on_end: Callable[[], object] | None = None

    @classmethod
    async def open(cls, intake: Intake, message: pb.GenerateRequest) -> "KeptStream":
        """Opens a stream of the caller, without a deadline. message: with a request_id. Raises RequestError."""
        kept = cls()
        opened: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()
        # In a list, so that the task holds the message alone, and no longer than it needs it.
        kept._task = asyncio.create_task(kept._hold(intake, [message], opened))
        del message
        try:
            kept.stream = await opened
        except asyncio.CancelledError:
            await kept.end()
            raise
        return kept

    def on_end(self, call: Callable[[], object]) -> None:
        """Calls `call` when the stream has ended; at once if it has."""
        self._on_end = call
        if self._has_ended:
            call()

    async def end(self) -> None:
        """Ends the stream, if it has not ended. What nobody has read is dropped."""
        # A task that was cancelled holds this object, by its traceback: their memory would wait for a collection.
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if self._outbox is not None:
            self._outbox.discard()

    async def _hold(self, intake: Intake, messages: list[pb.GenerateRequest], opened: "asyncio.Future[Stream]") -> None:
        request_id = messages[0].request_id
        try:
            async with intake.open(messages.pop(), None) as stream:
                self._outbox = outbox = stream.outbox
                ended = asyncio.Event()
                outbox.keep()
                outbox.on_close(ended.set)
                if not opened.done():
                    opened.set_result(stream)
                await ended.wait()
                outbox.raise_error()
        except RequestError as error:
            # Once the stream is open, its reader finds the error in the outbox.
            if not opened.done():
                opened.set_exception(error)
        except Exception as error:
            if not opened.done():
                opened.set_exception(error)
            else:
                log.exception("failed", extra=log_fields(request_id))
        finally:
            self._has_ended = True
            if self._on_end is not None:
                self._on_end()


@contextlib.asynccontextmanager
async def keeping(intake: Intake, message: pb.GenerateRequest) -> AsyncIterator[Stream]:
    """Opens a stream that need not be read to end: what it holds of the router's limits is then given back. It ends
    with this context at the latest. Raises RequestError."""
    kept = await KeptStream.open(intake, message)
    try:
        yield kept.stream
    finally:
        await kept.end()
