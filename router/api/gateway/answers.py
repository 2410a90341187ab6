"""How answers reach a client that may leave or read nothing."""

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Coroutine
from http import HTTPStatus
from typing import Any

from sse_starlette import EventSourceResponse
from sse_starlette.sse import SendTimeoutError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.api.gateway.events import Event
from router.streams import outbox

log = logging.getLogger("octavo.router.gateway")


class EventStream(EventSourceResponse):
    """Closes its source when the client's connection ends, even before the first chunk, or when the client has read
    nothing for UNREAD_S."""

    def __init__(self, chunks: AsyncGenerator[dict[str, str], None], source: AsyncGenerator[Event, None]) -> None:
        # Clients that split events by hand know only LF.
        super().__init__(chunks, send_timeout=outbox.UNREAD_S, sep="\n")
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except* SendTimeoutError:
            log.info("a client has read nothing for %g s: its stream ends", outbox.UNREAD_S)
        finally:
            await self._source.aclose()


async def answered(request: Request, collect: Coroutine[Any, Any, Response]) -> Response:
    """Answers in one piece, with what `collect` returns. A client that goes away cancels it."""

    async def until_gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    collecting, gone = asyncio.create_task(collect), asyncio.create_task(until_gone())
    try:
        await asyncio.wait({collecting, gone}, return_when=asyncio.FIRST_COMPLETED)
        # Nobody reads this answer: the client has gone.
        return collecting.result() if collecting.done() else Response(status_code=HTTPStatus.NO_CONTENT)
    finally:
        for task in (collecting, gone):
            task.cancel()
        await asyncio.gather(collecting, gone, return_exceptions=True)


def request_id_of(request: Request) -> str:
    return request.headers.get("x-request-id") or uuid.uuid4().hex
