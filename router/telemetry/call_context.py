"""The trace context of the call that a task answers, for gRPC and HTTP."""

import contextvars
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.telemetry.traceparent import TRACEPARENT, valid_traceparent

# A context variable, like security.identity's caller, so that every protocol passes it on.
_incoming: contextvars.ContextVar[str] = contextvars.ContextVar("traceparent", default="")


# The trace id of the request that the call brought, if that is traced.
_trace_id: contextvars.ContextVar[str] = contextvars.ContextVar("trace_id", default="")


def set_trace_id(trace_id: str) -> None:
    """Sets the trace id for the rest of this task."""
    _trace_id.set(trace_id)


def log_fields(request_id: str) -> dict[str, str]:
    """Fields for log lines about the call that this task answers."""
    trace_id = _trace_id.get()
    return {"request_id": request_id} | ({"trace_id": trace_id} if trace_id else {})


def incoming_traceparent() -> str:
    """The traceparent of the call that this task answers; empty if it brought none."""
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
    # With several values it is unknown which one counts.
    return valid_traceparent(found[0]) if len(found) == 1 else ""
