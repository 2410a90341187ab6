"""Ends a gRPC call with the status of what it raised, a reason for programs, and a delay after which to retry.

The delay is sent twice: as google.rpc.RetryInfo (AIP-193), for programs; and as pushback (gRFC A6), for the retries by
gRPC itself in clients whose service config has a retryPolicy, which need no code for it in any language.
"""

import contextlib
import functools
import logging
import math
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from router.errors import RequestError, status_of
from router.security.identity import set_connection
from router.telemetry.call_context import log_fields

_DETAILS_KEY, _PUSHBACK_KEY = "grpc-status-details-bin", "grpc-retry-pushback-ms"


_Method = TypeVar("_Method", bound=Callable[..., Any])
# ErrorInfo.domain of the reasons.
DOMAIN = "octavo"


def trailing_metadata(error: BaseException, code: grpc.StatusCode, message: str) -> tuple[tuple[str, str | bytes], ...]:
    """Returns the metadata for an abort with this code and message; empty if the error has no delay and no reason."""
    if not isinstance(error, RequestError):
        return ()
    details: list[Message] = []
    pushback: tuple[tuple[str, str | bytes], ...] = ()
    if error.reason:
        details.append(ErrorInfo(reason=error.reason, domain=DOMAIN))
    if error.retry_after_s is not None:
        milliseconds = math.ceil(error.retry_after_s * 1000)
        delay = Duration()
        delay.FromMilliseconds(milliseconds)
        details.append(RetryInfo(retry_delay=delay))
        pushback = ((_PUSHBACK_KEY, str(milliseconds)),)
    if not details:
        return ()
    status = Status(code=code.value[0], message=message)  # type: ignore[index]
    for detail in details:
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    return ((_DETAILS_KEY, status.SerializeToString()), *pushback)


log = logging.getLogger("octavo.router.service")


@contextlib.asynccontextmanager
async def grpc_errors(context: grpc.aio.ServicerContext, request_id: str = "") -> AsyncIterator[None]:
    """Ends the call with the status of what is raised inside, where the connection is known (security.identity).
    request_id: for the log."""
    set_connection(context.peer())
    try:
        yield
    except Exception as error:
        if isinstance(error, grpc.aio.InternalError) and context.done():
            # Raised by a write to a client that has gone.
            log.debug("the client has gone: %s", error, extra=log_fields(request_id))
            return
        await _end(context, error, request_id)
        raise


def guarded(method: _Method) -> _Method:
    """Makes a unary call's method end the call with the status of what it raises, as within grpc_errors."""

    @functools.wraps(method)
    async def answer(service: Any, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        set_connection(context.peer())
        request_id, answering = getattr(request, "request_id", ""), method(service, request, context)
        # It may be large: the method decides how long it is held.
        del request
        try:
            return await answering
        except Exception as error:
            await _end(context, error, request_id)
            raise

    return answer  # type: ignore[return-value]


async def _end(context: grpc.aio.ServicerContext[Any, Any], error: Exception, request_id: str) -> None:
    """Ends the call with the error's status, by an AbortError; returns if the call has ended by one already."""
    if isinstance(error, grpc.aio.AbortError):
        return
    code, message = status_of(error)
    if isinstance(error, RequestError):
        log.debug("ended: %s", error, extra=log_fields(request_id))
    else:
        log.error("failed", exc_info=error, extra=log_fields(request_id))
    await context.abort(code, message, trailing_metadata(error, code, message))
