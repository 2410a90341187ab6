"""A plain OpenAI server that computes nothing: it knows OpenAI's fields only, and refuses others."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

FIELDS = {"model", "stream", "stream_options", "prompt", "messages", "max_tokens", "max_completion_tokens"}
KEY = "sk-plain"
# Takes the number of output tokens; returns the events of a stream.
Events = Callable[[int, bool], list[dict[str, Any]]]


def piece(text: str, *, is_chat: bool, finish: str | None = None, **more: Any) -> dict[str, Any]:
    said = {"delta": {"content": text}} if is_chat else {"text": text}
    return {"id": "x", "model": "plain", "choices": [{"index": 0, **said, "finish_reason": finish}], **more}


def usage(tokens: int) -> dict[str, Any]:
    return {"prompt_tokens": 9, "completion_tokens": tokens, "total_tokens": 9 + tokens}


def two_in_an_event(num_tokens: int, is_chat: bool) -> list[dict[str, Any]]:
    """Events of two tokens each, which only the usage at the end tells."""
    pieces = [piece("a b", is_chat=is_chat) for _ in range(num_tokens // 2)]
    return [*pieces, piece("", is_chat=is_chat, finish="length"), {"choices": [], "usage": usage(num_tokens)}]


class PlainServer:
    def __init__(self, events: Events = two_in_an_event) -> None:
        self._events = events
        self.bodies: list[dict[str, Any]] = []
        self.port = 0
        self.app = Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/completions", self._complete, methods=["POST"]),
                Route("/v1/chat/completions", self._complete, methods=["POST"]),
            ]
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "plain", "object": "model", "owned_by": "someone"}]})

    async def _complete(self, request: Request) -> Response:
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return JSONResponse({"error": {"message": "who are you?"}}, 401)
        body = await request.json()
        if unknown := sorted(body.keys() - FIELDS):
            return JSONResponse({"error": {"message": f"Unrecognized request argument: {unknown[0]}"}}, 400)
        self.bodies.append(body)
        num_tokens = body.get("max_tokens") or body["max_completion_tokens"]
        events = self._events(num_tokens, "messages" in body)

        async def sent() -> AsyncIterator[str]:
            for event in events:
                yield f"data: {json.dumps(event)}\n\n"
                await asyncio.sleep(0.002)
            yield "data: [DONE]\n\n"

        return StreamingResponse(sent(), media_type="text/event-stream")


class _Server(uvicorn.Server):
    """Leaves signals to the tests."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def running(server: PlainServer) -> AsyncIterator[PlainServer]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server.port = listening.getsockname()[1]
        http = _Server(uvicorn.Config(server.app, log_config=None, lifespan="off", ws="none"))
        # Connections wait in the socket's queue until the server takes them.
        task = asyncio.create_task(http.serve([listening]))
        try:
            yield server
        finally:
            http.should_exit = True
            await task
