"""Ends a gRPC call with the status of what it raised, and with when to try again.

The delay is given twice: as google.rpc has it (AIP-193), for programs; and for retries by gRPC itself, of clients whose
service config has a retryPolicy (gRFC A6, "pushback"), which need no code for it in any language.
"""

import contextlib
import logging
import math
from collections.abc import AsyncIterator

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from router.errors import RequestError, status_of
from router.telemetry.call_context import log_fields

_DETAILS_KEY, _PUSHBACK_KEY = "grpc-status-details-bin", "grpc-retry-pushback-ms"


def trailing_metadata(error: BaseException, code: grpc.StatusCode, message: str) -> tuple[tuple[str, str | bytes], ...]:
    """For the abort of a call with this code and message; empty if there is nothing more to say."""
    if not isinstance(error, RequestError) or error.retry_after_s is None:
        return ()
    milliseconds = math.ceil(error.retry_after_s * 1000)
    delay = Duration()
    delay.FromMilliseconds(milliseconds)
    detail = AnyMessage()
    detail.Pack(RetryInfo(retry_delay=delay))
    status = Status(code=code.value[0], message=message, details=[detail])  # type: ignore[index]
    return ((_DETAILS_KEY, status.SerializeToString()), (_PUSHBACK_KEY, str(milliseconds)))


log = logging.getLogger("octavo.router.service")


@contextlib.asynccontextmanager
async def grpc_errors(context: grpc.aio.ServicerContext, request_id: str = "") -> AsyncIterator[None]:
    """Ends the call with the status of what is raised inside. request_id: for the log."""
    try:
        yield
    except RequestError as error:
        log.debug("ended: %s", error, extra=log_fields(request_id))
        code, message = status_of(error)
        await context.abort(code, message, trailing_metadata(error, code, message))
    except grpc.aio.AbortError:
        raise
    except Exception as error:
        if isinstance(error, grpc.aio.InternalError) and context.done():
            # Of a write to a client that has gone.
            log.debug("the client has gone: %s", error, extra=log_fields(request_id))
            return
        log.exception("failed", extra=log_fields(request_id))
        await context.abort(*status_of(error))
