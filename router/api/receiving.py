"""Receives the messages of gRPC calls, and bounds what they may hold together.

gRPC reads a message as soon as it is asked for one, at its sender's speed and up to max_message_bytes: 100 calls of
16 MiB took a router 5 GiB. So only a number of calls may receive at once; the next ones wait, callers in turn. And
callers share the bytes of large messages that have arrived and are not accepted yet (runtime.shares).
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any

import grpc
import grpc.aio
from grpc.aio import EOF  # type: ignore[attr-defined]

from router.api.grpc_errors import grpc_errors
from router.errors import InvalidRequest, RequestError, RouterFull
from router.security.held import set_release
from router.security.identity import caller_share
from router.text.tokenizer_pool import Turns
from runtime.shares import SharedRoom

# Time for a message to arrive; while others wait, a message that is not there after the second one is given up.
_MESSAGE_S, _PATIENCE_S = 60.0, 0.5
# Smaller messages do not count. They come together with their call.
_SMALL_BYTES = 65_536
_RETRY_S = 1.0


class Receiving(grpc.aio.ServerInterceptor):
    """Receives the message of each call that has one, in place of gRPC. The last interceptor."""

    def __init__(self, *, max_message_bytes: int, max_total_bytes: int) -> None:
        """max_total_bytes: option max_bodies_bytes."""
        self._turns = Turns(max(1, max_total_bytes // max_message_bytes))
        self._held = SharedRoom(max_total_bytes)
        # Held while a large message is parsed, which takes up to 2 ms a MB.
        self._parsing = asyncio.Lock()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        # On the wire a call with one message is like one with many.
        parse, serialize = handler.request_deserializer, handler.response_serializer
        if handler.response_streaming:

            async def answer(requests: object, context: grpc.aio.ServicerContext) -> None:
                async with self._received(context) as message:
                    try:
                        responses = handler.unary_stream(await self._parsed(parse, message), context)
                        if isinstance(responses, AsyncIterator):
                            async for response in responses:
                                await context.write(response)
                        else:
                            await responses
                    except grpc.aio.AbortError as error:
                        raise _without_frames(error) from None

            return grpc.stream_stream_rpc_method_handler(answer, response_serializer=serialize)

        async def answer_once(requests: object, context: grpc.aio.ServicerContext) -> Any:
            async with self._received(context) as message:
                try:
                    return await handler.unary_unary(await self._parsed(parse, message), context)
                except grpc.aio.AbortError as error:
                    raise _without_frames(error) from None

        return grpc.stream_unary_rpc_method_handler(answer_once, response_serializer=serialize)

    @contextlib.asynccontextmanager
    async def _received(self, context: Any) -> AsyncIterator[list[bytes]]:
        """The message of a call, alone in a list, so that who takes it holds it alone.

        It counts while inside, unless it is accepted earlier (security.held.release).
        """
        async with contextlib.AsyncExitStack() as held:
            async with grpc_errors(context):
                message = await self._receive(context, held)
            yield message

    async def _receive(self, context: Any, held: contextlib.AsyncExitStack) -> list[bytes]:
        """held: ends the message's share. Raises RequestError."""
        caller = caller_share()
        await self._turns.take(caller)
        try:
            message = await self._read(context)
        finally:
            self._turns.give_back()
        if message is EOF:
            raise InvalidRequest("the call has no message")
        size = len(message)
        if size > _SMALL_BYTES:
            if not self._held.take(caller, size):
                # The error's traceback would hold it.
                del message
                raise self._full(
                    f"{self._held.total} bytes of messages wait here, {self._held.of(caller)} of them from this "
                    f"caller, and this one has {size}: a caller may have as many as are free of "
                    f"max_bodies_bytes={self._held.size}"
                )
            release = contextlib.ExitStack()
            release.callback(self._held.give_back, caller, size)
            held.callback(release.close)
            set_release(release.close)
        return [message]

    async def _parsed(self, parse: Callable[[bytes], Any], message: list[bytes]) -> Any:
        """Parses a message, of which nothing is left. What waits for the event loop gets it before and behind each
        large one."""
        if len(message[0]) <= _SMALL_BYTES:
            return parse(message.pop())
        async with self._parsing:
            await asyncio.sleep(0)
            parsed = parse(message.pop())
            await asyncio.sleep(0)
        return parsed

    async def _read(self, context: Any) -> Any:
        """Raises RequestError."""
        patience = _Patience(self._turns)
        try:
            async with patience:
                return await context.read()
        except TimeoutError:
            if patience.is_exhausted:
                raise InvalidRequest(f"the message has not arrived within {_MESSAGE_S:g} s") from None
            raise self._full(
                "as many calls as may wait for their message at once do so, and this one's has not arrived"
            ) from None

    def _full(self, why: str) -> RequestError:
        error = RouterFull(f"{why}; try again later or at another router")
        error.retry_after_s = _RETRY_S
        return error


def _without_frames(error: grpc.aio.AbortError) -> grpc.aio.AbortError:
    """Returns the error without its traceback. gRPC keeps it in a cycle until the next garbage collection, and the
    frames of the traceback hold the message."""
    error.__context__ = None
    return error.with_traceback(None)


class _Patience:
    """Raises TimeoutError from what runs inside if it takes too long."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._limit = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_exhausted(self) -> bool:
        return self._loop.time() - self._began >= _MESSAGE_S

    async def __aenter__(self) -> None:
        await self._limit.__aenter__()
        self._look_again(others_waited=False)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._limit.__aexit__(kind, error, traceback)

    def _look(self, others_waited: bool) -> None:
        # After a stall of the loop, timers run before messages are read. So the first look only says to look again.
        others_wait = self._turns.has_waiting
        if self.is_exhausted or (others_waited and others_wait):
            self._limit.reschedule(self._loop.time())
        else:
            self._look_again(others_waited=others_wait)

    def _look_again(self, *, others_waited: bool) -> None:
        self._timer = self._loop.call_later(_PATIENCE_S / 2, self._look, others_waited)
