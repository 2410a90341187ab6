"""Bounds the streams that anybody may open without a key: watches of grpc.health.v1, and reflection."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health

from router.api.grpc_errors import grpc_errors
from router.errors import InvalidRequest, RouterFull
from router.security.identity import caller_share
from runtime.shares import SharedRoom

# A watch takes 10 KiB. Connections get at most as many as are free.
_MOST_STREAMS = 4096
# Questions of one reflection stream; each costs as much as a call. Tools ask one for each of some ten services.
MOST_MESSAGES = 32
_RETRY_S = 10.0
_PREFIXES = (f"/{health.SERVICE_NAME}/", "/grpc.reflection.")


class OpenStreams(grpc.aio.ServerInterceptor):
    """Counts these streams by connection, and refuses those that are too many. It stands behind Receiving, which reads
    their messages."""

    def __init__(self, most_streams: int = _MOST_STREAMS) -> None:
        self._room = SharedRoom(most_streams)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        details: Any = handler_call_details
        if handler is None or not handler.response_streaming or not details.method.startswith(_PREFIXES):
            return handler
        inner = handler.stream_stream or handler.unary_stream
        make = (
            grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
        )

        async def answer(request: Any, context: grpc.aio.ServicerContext) -> None:
            async with grpc_errors(context):
                caller = caller_share()
                if not self._room.take(caller, 1):
                    raise self._full(caller)
                try:
                    responses = inner(_bounded(request) if handler.request_streaming else request, context)
                    if isinstance(responses, AsyncIterator):
                        async for response in responses:
                            await context.write(response)
                    else:
                        await responses
                finally:
                    self._room.give_back(caller, 1)

        return make(
            answer, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
        )

    def _full(self, caller: str) -> RouterFull:
        error = RouterFull(
            f"{self._room.total} streams of health and reflection are open here, {self._room.of(caller)} of them on "
            f"this connection: a connection may have as many as are free of {self._room.size}; end some, or ask Check"
        )
        error.retry_after_s = _RETRY_S
        return error


async def _bounded(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Yields the messages of a stream. Raises InvalidRequest after MOST_MESSAGES."""
    count = 0
    async for request in requests:
        count += 1
        if count > MOST_MESSAGES:
            raise InvalidRequest(f"more than {MOST_MESSAGES} messages in one stream: open another one")
        yield request
