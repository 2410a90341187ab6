"""Authenticates every call, gRPC or HTTP, before any service sees it."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from router.errors import Unauthenticated, status_of
from router.security.identity import set_caller
from router.security.keys import Keys

# Open to all: what probes and tools ask before they have a key.
_OPEN_SERVICES = (f"/{health.SERVICE_NAME}/", "/grpc.reflection.v1.", "/grpc.reflection.v1alpha.")
_OPEN_PATHS = ("/health", "/openapi.json", "/docs", "/console")
_OPEN_FOLDERS = ("/docs/", "/console/static/")


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Checks the key of each call of any gRPC service."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        details: Any = handler_call_details
        if not details.method.startswith(_OPEN_SERVICES):
            headers = {name: value for name, value in details.invocation_metadata if isinstance(value, str)}
            try:
                set_caller(self._keys.identify(headers.get("authorization", ""), headers.get("x-api-key", "")))
            except Unauthenticated as error:
                return _refuse(error)
        return await continuation(handler_call_details)


def _refuse(error: Unauthenticated) -> grpc.RpcMethodHandler:
    # A stream-stream handler suits a method of any kind: it answers before it has read anything.
    async def answer(requests: object, context: grpc.aio.ServicerContext) -> None:
        await context.abort(*status_of(error))

    return grpc.stream_stream_rpc_method_handler(answer)


def is_open(path: str) -> bool:
    """Tells whether a path is open to all: it is the same in every copy of Octavo, or says whether it is ready."""
    return path in _OPEN_PATHS or path.startswith(_OPEN_FOLDERS)


class KeyMiddleware:
    """Checks the key of each request to an ASGI application."""

    def __init__(self, app: ASGIApp, keys: Keys, refuse: Callable[[Unauthenticated, str], Response]) -> None:
        """refuse: gets the path, too."""
        self._app, self._keys, self._refuse = app, keys, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_open(scope["path"]):
            headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
            try:
                set_caller(self._keys.identify(headers.get("authorization", ""), headers.get("x-api-key", "")))
            except Unauthenticated as error:
                await self._refuse(error, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)
