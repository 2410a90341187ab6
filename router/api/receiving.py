"""Receives the messages of gRPC calls, and bounds what they may hold together.

gRPC reads a message as soon as it is asked for one, at its sender's speed and up to max_message_bytes: 100 calls of
16 MiB took a router 5 GiB. So only a number of calls may receive at once; the next ones wait, callers in turn. And
callers share the memory of large messages that have arrived and are not accepted yet (runtime.shares).

Before a message is parsed, its elements are counted (router.api.elements): parsed, each takes up to 60 times its bytes.
What the router does not know in a message is dropped with it.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc.aio import EOF  # type: ignore[attr-defined]

from router.api.elements import Count, Plan, counting, plan_of_method
from router.api.grpc_errors import grpc_errors
from router.errors import InvalidRequest, RequestError, RouterFull
from router.security.identity import caller_share
from router.security.message_memory import set_release
from router.turns import Turns
from runtime.shares import SharedRoom

# Time for a message to arrive; while others wait, a message that is not there after the second one is given up.
_MESSAGE_S, _PATIENCE_S = 60.0, 0.5
# Messages that take less memory do not count. They come together with their call.
_SMALL_BYTES = 65_536
_RETRY_S = 1.0
# A call with many messages may be silent for so long while others wait to be read.
_SILENCE_S = 60.0
# Such calls, of which each may wait for a message, for each call that receives the one it has.
_STREAMS_PER_TURN = 4
# Messages with more bytes in unknown fields are made anew without them.
_UNKNOWN_BYTES = 1_024


class Receiving(grpc.aio.ServerInterceptor):
    """Receives the messages of each call, in place of gRPC. Those behind it get messages as it passes them on."""

    def __init__(self, *, max_message_bytes: int, max_total_bytes: int) -> None:
        """max_total_bytes: option max_bodies_bytes."""
        num_turns = max(1, max_total_bytes // max_message_bytes)
        self._turns, self._stream_turns = Turns(num_turns), Turns(_STREAMS_PER_TURN * num_turns)
        self._held = SharedRoom(max_total_bytes)
        # Held while a large message is counted or parsed, which takes up to 20 ms, and 2 ms a MB.
        self._parsing = asyncio.Lock()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        # On the wire a call with one message is like one with many.
        parse, serialize = handler.request_deserializer, handler.response_serializer
        plan = plan_of_method(handler_call_details.method)
        if handler.request_streaming:
            assert handler.response_streaming, "no service has such a method"

            async def answer_all(requests: object, context: grpc.aio.ServicerContext) -> None:
                async with grpc_errors(context), contextlib.aclosing(self._messages(parse, plan, context)) as messages:
                    await _pass_on(handler.stream_stream(messages, context), context)

            return grpc.stream_stream_rpc_method_handler(answer_all, response_serializer=serialize)
        if handler.response_streaming:

            async def answer(requests: object, context: grpc.aio.ServicerContext) -> None:
                async with self._received(parse, plan, context) as message:
                    try:
                        await _pass_on(handler.unary_stream(message.pop(), context), context)
                    except grpc.aio.AbortError as error:
                        raise _without_frames(error) from None

            return grpc.stream_stream_rpc_method_handler(answer, response_serializer=serialize)

        # The method writes a serialized answer by itself.
        if getattr(handler.unary_unary, "writes_answer", False):

            async def answer_itself(requests: object, context: grpc.aio.ServicerContext) -> None:
                async with self._received(parse, plan, context) as message:
                    try:
                        await handler.unary_unary(message.pop(), context)
                    except grpc.aio.AbortError as error:
                        raise _without_frames(error) from None

            return grpc.stream_stream_rpc_method_handler(answer_itself, response_serializer=None)

        async def answer_once(requests: object, context: grpc.aio.ServicerContext) -> Any:
            async with self._received(parse, plan, context) as message:
                try:
                    return await handler.unary_unary(message.pop(), context)
                except grpc.aio.AbortError as error:
                    raise _without_frames(error) from None

        return grpc.stream_unary_rpc_method_handler(answer_once, response_serializer=serialize)

    @contextlib.asynccontextmanager
    async def _received(self, parse: Callable[[bytes], Any], plan: Plan, context: Any) -> AsyncIterator[list[Any]]:
        """The message of a call, alone in a list, so that who takes it holds it alone.

        It counts while inside, unless it is accepted earlier (security.message_memory.release).
        """
        with contextlib.closing(_Share(self._held)) as share:
            async with grpc_errors(context):
                message = await self._receive(context, share)
                await self._parse(message, parse, plan, share)
            set_release(share.close)
            yield message

    async def _messages(self, parse: Callable[[bytes], Any], plan: Plan, context: Any) -> AsyncGenerator[Any, None]:
        """Yields the messages of a call that has many. The one behind a large one is read once that does not count any
        more: its reader calls security.message_memory.release.

        Raises RequestError.
        """
        while True:
            await self._stream_turns.take(caller_share())
            try:
                message = [await self._read(context, self._stream_turns, _SILENCE_S, math.inf)]
            finally:
                self._stream_turns.give_back()
            if message[0] is EOF:
                return
            with contextlib.closing(_Share(self._held)) as share:
                self._hold(len(message[0]), share)
                await self._parse(message, parse, plan, share)
                set_release(share.close)
                yield message.pop()
                await share.wait_closed()

    async def _receive(self, context: Any, share: "_Share") -> list[bytes]:
        """Raises RequestError."""
        await self._turns.take(caller_share())
        try:
            message = await self._read(context, self._turns, _PATIENCE_S, _MESSAGE_S)
        finally:
            self._turns.give_back()
        if message is EOF:
            raise InvalidRequest("the call has no message")
        size = len(message)
        if size > _SMALL_BYTES:
            received = [message]
            # The error's traceback would hold it.
            del message
            self._hold(size, share)
            return received
        return [message]

    def _hold(self, size: int, share: "_Share") -> None:
        """Takes room for bytes of a message. Raises RouterFull."""
        if size > _SMALL_BYTES and not share.take(size):
            raise self._full(
                f"{self._held.total} bytes of messages wait here, {self._held.of(share.caller)} of them from this "
                f"caller, and this one takes {size} more: a caller may have as many as are free of "
                f"max_bodies_bytes={self._held.size}"
            )

    async def _parse(self, message: list[Any], parse: Callable[[bytes], Any], plan: Plan, share: "_Share") -> None:
        """Puts the parsed message in the place of its bytes, of which nothing is left. Raises RequestError."""
        refused: RequestError | None = None
        try:
            count = await self._counted(message[0], plan)
            self._hold(count.expanded_bytes, share)
            if len(message[0]) <= _SMALL_BYTES:
                message.append(_parsed(parse, message.pop(), count))
                return
            async with self._parsing:
                # Other callbacks run before and after each large message.
                await asyncio.sleep(0)
                message.append(_parsed(parse, message.pop(), count))
                await asyncio.sleep(0)
        except RequestError as error:
            # The frames of its traceback hold the message.
            refused = error.with_traceback(None)
        except DecodeError as error:
            refused = InvalidRequest(f"the message can't be read: {error}")
        if refused is not None:
            message.clear()
            raise refused

    async def _counted(self, message: bytes, plan: Plan) -> Count:
        """Raises InvalidRequest."""
        count = Count()
        steps = counting(message, plan, count)
        for _ in steps:
            # More than a slice.
            async with self._parsing:
                for _ in steps:
                    await asyncio.sleep(0)
        return count

    async def _read(self, context: Any, turns: Turns, patience_s: float, most_s: float) -> Any:
        """Raises RequestError."""
        patience = _Patience(turns, patience_s, most_s)
        try:
            async with patience:
                return await context.read()
        except TimeoutError:
            if patience.is_exhausted:
                raise InvalidRequest(f"the message has not arrived within {most_s:g} s") from None
            raise self._full("too many calls wait for their message, and this call's has not arrived in time") from None

    def _full(self, why: str) -> RequestError:
        error = RouterFull(f"{why}; try again later or at another router")
        error.retry_after_s = _RETRY_S
        return error


class _Share:
    """The memory for which a message counts, of its caller."""

    def __init__(self, room: SharedRoom) -> None:
        self.caller, self._room, self._size = caller_share(), room, 0
        self._closed = asyncio.Event()

    async def wait_closed(self) -> None:
        """Returns at once if the message does not count."""
        if self._size:
            await self._closed.wait()

    def take(self, size: int) -> bool:
        """Returns False, and takes nothing, if there is no room."""
        if not self._room.take(self.caller, size):
            return False
        self._size += size
        return True

    def close(self) -> None:
        if self._size:
            self._room.give_back(self.caller, self._size)
            self._size = 0
            self._closed.set()


def _parsed(parse: Callable[[bytes], Any], message: bytes, count: Count) -> Any:
    """Raises DecodeError."""
    parsed = parse(message)
    if count.unknown_bytes > _UNKNOWN_BYTES:
        # A message's memory is freed as a whole.
        parsed.DiscardUnknownFields()
        parsed = parse(parsed.SerializeToString())
    return parsed


async def _pass_on(responses: Any, context: grpc.aio.ServicerContext) -> None:
    """responses: what a method that streams returned."""
    if isinstance(responses, AsyncIterator):
        async for response in responses:
            await context.write(response)
    else:
        await responses


def _without_frames(error: grpc.aio.AbortError) -> grpc.aio.AbortError:
    """Returns the error without its traceback. gRPC keeps it in a cycle until the next garbage collection, and the
    frames of the traceback hold the message."""
    error.__context__ = None
    return error.with_traceback(None)


class _Patience:
    """Raises TimeoutError from what runs inside if it takes too long."""

    def __init__(self, turns: Turns, patience_s: float, most_s: float) -> None:
        """patience_s: while others wait. most_s: in any case."""
        self._turns, self._patience_s, self._most_s = turns, patience_s, most_s
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._limit = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_exhausted(self) -> bool:
        return self._loop.time() - self._began >= self._most_s

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
        self._timer = self._loop.call_later(self._patience_s / 2, self._look, others_waited)
