"""Receives the bodies of requests and has them parsed.

Callers share the bytes that are held at once (runtime.shares), each body has a deadline and no more bytes than its
request can use, and what takes long to parse is parsed in another process, one at a time and callers in turn.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus

import anyio
import anyio.to_process
from starlette.requests import Request

from router.api.gateway.errors import BadRequestError
from router.api.gateway.reading import parsing
from router.api.gateway.reading.parsing import Kind, Parsed, Sent
from router.errors import RouterFull, Unavailable
from router.intake.intake import Intake
from router.request.chat import MAX_TEMPLATE_ARGUMENTS_BYTES
from router.security.identity import caller_share, set_connection
from router.security.message_memory import set_release
from router.turns import Turns
from runtime.shares import SharedRoom

# Time for a request's body to arrive.
BODY_S = 60.0
# Time for the other process to parse one: 30 times what the worst of 21 MB took. Beyond it the process is killed.
PARSE_S = 60.0
# A character of a JSON string takes up to 12 bytes: two escapes of six.
_CHARACTER_BYTES = 12
# Everything in a chat's body besides its texts and template arguments.
_OTHER_BYTES = 2**20
_RETRY_S = 1.0
# A large body is handed over in such parts, or longer ones.
_PART_BYTES = 2**20


class Bodies:
    """The bodies that a router process holds."""

    def __init__(self, intake: Intake, *, max_bytes: int, max_total_bytes: int, is_strict: bool) -> None:
        """max_bytes: of one body. max_total_bytes: of all, option max_bodies_bytes. is_strict: option strict_fields."""
        self._intake, self._max_bytes, self._is_strict = intake, max_bytes, is_strict
        self._shared = SharedRoom(max_total_bytes)
        self._parser = anyio.CapacityLimiter(1)
        self._turns = Turns(1)

    async def parse(self, request: Request, kind: Kind, request_id: str, held: contextlib.ExitStack) -> Parsed:
        """held: ends the body's share, unless it is accepted earlier (security.message_memory.release).

        Raises BadRequestError, RouterFull, and starlette's ClientDisconnect.
        """
        if request.client is not None:
            set_connection(f"{request.client.host}:{request.client.port}")
        async with self._received(request, self._most_bytes(kind)) as body:
            if parsing.is_light(body):
                parsed = parsing.parse(kind, body, request_id, is_strict=self._is_strict)
            else:
                parsed = await self._parse_apart(kind, body, request_id)
            caller = caller_share()
            self._shared.add(caller, len(body))
            held.callback(self._shared.give_back, caller, len(body))
            set_release(held.close)
            return parsed

    async def whole(self, request: Request, most_bytes: int) -> bytes:
        """Returns a small body as it is. Raises BadRequestError, RouterFull, and starlette's ClientDisconnect."""
        async with self._received(request, most_bytes) as body:
            return bytes(body)

    async def pass_on(self, request: Request, take: Callable[[bytes], Awaitable[None]]) -> None:
        """Hands over a body of any size in parts. It may take BODY_S for each max_message_bytes, or a part of them.

        Raises BadRequestError, RouterFull, ClientDisconnect, and what `take` raises.
        """
        caller, began, size = caller_share(), asyncio.get_running_loop().time(), 0
        held = bytearray()
        try:
            async with asyncio.timeout(BODY_S) as limit:
                async for part in request.stream():
                    if not self._shared.take(caller, len(part)):
                        raise self._full(caller)
                    held += part
                    size += len(part)
                    limit.reschedule(began + BODY_S * (1 + size / self._max_bytes))
                    if len(held) >= _PART_BYTES:
                        await take(bytes(held))
                        self._shared.give_back(caller, len(held))
                        held.clear()
                await take(bytes(held))
        except TimeoutError:
            raise BadRequestError(
                f"{size} bytes of the body have arrived: it comes too slowly", status=HTTPStatus.REQUEST_TIMEOUT
            ) from None
        finally:
            self._shared.give_back(caller, len(held))

    @property
    def _most_chars(self) -> int:
        """The most characters that a prompt can use; 0: not known yet."""
        return self._intake.max_model_len * self._intake.tokenizer.tokenizer.longest_token

    def _most_bytes(self, kind: Kind) -> int:
        """The most bytes that a request can use."""
        if kind not in ("chat", "tokenize", "messages", "count_tokens", "response") or not self._most_chars:
            # A completion has many prompts, each as long as the model takes.
            return self._max_bytes
        text_bytes = _CHARACTER_BYTES * self._most_chars + self._intake.max_item_bytes * 4 // 3
        return min(self._max_bytes, text_bytes + 6 * MAX_TEMPLATE_ARGUMENTS_BYTES + _OTHER_BYTES)

    @contextlib.asynccontextmanager
    async def _received(self, request: Request, most_bytes: int) -> AsyncIterator[bytearray]:
        """The body, held while inside."""
        told = request.headers.get("content-length", "0")
        # The HTTP server has checked it, unless another one runs the application.
        self._check_size(int(told) if re.fullmatch(r"[0-9]{1,20}", told) else 0, most_bytes)
        caller, body = caller_share(), bytearray()
        try:
            try:
                async with asyncio.timeout(BODY_S):
                    async for part in request.stream():
                        if not self._shared.take(caller, len(part)):
                            raise self._full(caller)
                        body += part
                        self._check_size(len(body), most_bytes)
            except TimeoutError:
                raise BadRequestError(
                    f"the body has not arrived within {BODY_S:g} s", status=HTTPStatus.REQUEST_TIMEOUT
                ) from None
            yield body
        finally:
            self._shared.give_back(caller, len(body))

    def _check_size(self, size: int, most_bytes: int) -> None:
        if size > most_bytes:
            limit = f"max_message_bytes={most_bytes}"
            if most_bytes < self._max_bytes:
                limit = f"{most_bytes} bytes, the most that a chat of this model can use"
            raise BadRequestError(f"the body has more than {limit}", status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE)

    def _full(self, caller: str) -> RouterFull:
        shared = self._shared
        error = RouterFull(
            f"this router holds {shared.total} bytes of request bodies, {shared.of(caller)} of them from this caller. "
            f"A caller may have as many as are free of max_bodies_bytes={shared.size}: try again later or at "
            "another one"
        )
        error.retry_after_s = _RETRY_S
        return error

    async def _parse_apart(self, kind: Kind, body: bytearray, request_id: str) -> Parsed:
        await self._turns.take(caller_share())
        # The next turn comes when the process is done, even if the client leaves.
        work = asyncio.create_task(self._run_parser(kind, bytes(body), request_id))
        work.add_done_callback(self._end_turn)
        return parsing.received(*await asyncio.shield(work))

    async def _run_parser(self, kind: Kind, body: bytes, request_id: str) -> tuple[Parsed, list[Sent]]:
        try:
            async with asyncio.timeout(PARSE_S):
                return await anyio.to_process.run_sync(
                    parsing.parse_to_bytes,
                    kind,
                    body,
                    request_id,
                    self._is_strict,
                    self._most_chars,
                    # The process is killed at the timeout: one that is stopped would hold its turn forever.
                    cancellable=True,
                    limiter=self._parser,
                )
        except TimeoutError:
            raise Unavailable(f"the body was not parsed within {PARSE_S:g} s: try again, or another router") from None

    def _end_turn(self, work: asyncio.Task[object]) -> None:
        self._turns.give_back()
        if not work.cancelled():
            # Marks the error as seen, for a client that has left.
            work.exception()
