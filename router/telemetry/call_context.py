"""The trace context of the call that a task answers, for gRPC and HTTP."""

import contextvars
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.telemetry.tracing import TRACEPARENT, valid_traceparent

# Ambient, as security.identity's caller: every protocol hands it on.
_incoming: contextvars.ContextVar[str] = contextvars.ContextVar("traceparent", default="")


# Of the request that the call has become, if that is traced.
_trace_id: contextvars.ContextVar[str] = contextvars.ContextVar("trace_id", default="")


def set_trace_id(trace_id: str) -> None:
    """For the rest of this task: it answers a request of that trace."""
    _trace_id.set(trace_id)


def log_fields(request_id: str) -> dict[str, str]:
    """For lines in the log about the call that this task answers."""
    trace_id = _trace_id.get()
    return {"request_id": request_id} | ({"trace_id": trace_id} if trace_id else {})


def incoming_traceparent() -> str:
    """That of the call that this task answers; empty if it brought none."""
    return _incoming.get()


class TraceInterceptor(grpc.aio.ServerInterceptor):
    """Notes the metadata `traceparent` of calls of any gRPC service."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        details: Any = handler_call_details
        _incoming.set(_traceparent_in(details.invocation_metadata))
        return await continuation(handler_call_details)


class TraceMiddleware:
    """Notes the header `traceparent` of requests to an ASGI application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]]
            _incoming.set(_traceparent_in(headers))
        await self._app(scope, receive, send)


def _traceparent_in(headers: Any) -> str:
    """headers: pairs of name and value; gRPC's may be bytes."""
    found = [value for name, value in headers if name == TRACEPARENT and isinstance(value, str)]
    # Of several nobody knows which one counts.
    return valid_traceparent(found[0]) if len(found) == 1 else ""
