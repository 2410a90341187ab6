"""The endpoints of files and batches, as OpenAI's clients call them."""

import asyncio
import logging
import time
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from router.api.gateway.batches.records import ENDED, Batch, Record, create, shown_file
from router.api.gateway.batches.runner import Runner
from router.api.gateway.batches.store import BatchStore, StoredFile, new_id
from router.api.gateway.batches.uploads import PURPOSE, Upload
from router.api.gateway.errors import BadRequestError, of_validation
from router.api.gateway.ignored import IgnoredFields
from router.api.gateway.openai.fields import Effect, Fields, Reading, at_most
from router.api.gateway.reading.bodies import Bodies
from router.api.gateway.responses.store import StoreError
from router.batches.lines import ENDPOINTS
from router.errors import RouterFull, Unavailable
from router.security.identity import caller, caller_share
from router.streams import outbox
from runtime.shares import SharedRoom

log = logging.getLogger("octavo.router.batches")

# Beyond that, the oldest batches of a tenant that have ended are forgotten.
MAX_BATCHES = 1000
# A tenant's files.
MAX_FILES = 10_000
# Uploads that a router process takes at once, and how much of the store they may fill between two looks at it.
_MOST_UPLOADS, _RECHECKS = 64, 64
_LIST_MOST, _LIST_DEFAULT = 100, 20
_MAX_METADATA, _DAY_S = 16, 86_400
_BODY_BYTES = 65_536
T = TypeVar("T", StoredFile, Record)


class BatchRequest(Fields):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    completion_window: Literal["24h"] = "24h"
    metadata: Annotated[dict[str, str], at_most(_MAX_METADATA)] | None = None
    output_expires_after: Annotated[Any, Effect("files stay until they are deleted", is_refused=False)] = None


assert ENDPOINTS == ("/v1/chat/completions", "/v1/completions", "/v1/responses")


class _Content(FileResponse):
    """Ends for a client that reads nothing."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def bounded(message: Message) -> None:
            async with asyncio.timeout(outbox.UNREAD_S):
                await send(message)

        try:
            await super().__call__(scope, receive, bounded)
        except TimeoutError:
            log.info("a client has read nothing of a file for %g s: its connection ends", outbox.UNREAD_S)


class Batches:
    def __init__(
        self, bodies: Bodies, ignored: IgnoredFields, store: BatchStore | None, runner: Runner | None, is_strict: bool
    ) -> None:
        """store, runner: None without batches_dir. is_strict: option strict_fields."""
        self._bodies, self._ignored, self._is_strict = bodies, ignored, is_strict
        self._given, self._runner = store, runner
        self._uploads = SharedRoom(_MOST_UPLOADS)
        self.routes = [
            Route("/v1/files", self._upload, methods=["POST"]),
            Route("/v1/files", self._files, methods=["GET"]),
            Route("/v1/files/{file_id}", self._file, methods=["GET"]),
            Route("/v1/files/{file_id}", self._delete, methods=["DELETE"]),
            Route("/v1/files/{file_id}/content", self._content, methods=["GET"]),
            Route("/v1/batches", self._create, methods=["POST"]),
            Route("/v1/batches", self._list, methods=["GET"]),
            Route("/v1/batches/{batch_id}", self._show, methods=["GET"]),
            Route("/v1/batches/{batch_id}/cancel", self._cancel, methods=["POST"]),
        ]

    @property
    def _store(self) -> BatchStore:
        """Raises BadRequestError."""
        if self._given is None:
            message = "there are no files and batches here: the option batches_dir names no directory for them"
            raise BadRequestError(message, status=HTTPStatus.NOT_FOUND, code="no_batches_dir")
        return self._given

    # --- Files

    async def _upload(self, request: Request) -> Response:
        store, tenant, share = self._store, caller().tenant, caller_share()
        if not self._uploads.take(share, 1):
            raise RouterFull(f"{self._uploads.total} files arrive at this router at once: try again later")
        try:
            told = request.headers.get("content-length", "0")
            await self._check_room(int(told) if told.isdecimal() and len(told) < 20 else 0)
            part = await store.run(store.new_part, tenant)
            try:
                filename = await self._receive(request, part)
                file = await store.run(store.add_upload, tenant, part, filename, PURPOSE)
            finally:
                await store.run(lambda: part.unlink(missing_ok=True))
        except StoreError as error:
            raise Unavailable(f"the file can't be stored: {error}") from None
        finally:
            self._uploads.give_back(share, 1)
        return JSONResponse(shown_file(file))

    async def _receive(self, request: Request, part: Path) -> str:
        """Writes the file to a path. Returns its name."""
        store, unchecked = self._store, 0
        upload = await store.run(Upload, request.headers.get("content-type", ""), part)

        async def take(data: bytes) -> None:
            nonlocal unchecked
            await store.run(upload.feed, data)
            unchecked += len(data)
            if unchecked > store.max_bytes // _RECHECKS:
                unchecked = 0
                await self._check_room(0)

        try:
            await self._bodies.pass_on(request, take)
            await store.run(upload.finish)
        finally:
            await store.run(upload.close)
        assert upload.filename is not None
        return upload.filename

    async def _check_room(self, num_bytes: int) -> None:
        """Raises BadRequestError, Unavailable."""
        store, identity = self._store, caller()
        why = await self._run(store.why_full, identity.tenant, identity.weight, num_bytes)
        if not why and await self._run(store.num_files, identity.tenant) >= MAX_FILES:
            why = f"{MAX_FILES} files of yours are stored: delete some"
        if why:
            raise BadRequestError(why, param="file", status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE)

    async def _files(self, request: Request) -> Response:
        files = await self._run(self._store.files, caller().tenant)
        purpose = request.query_params.get("purpose")
        files = [each for each in files if purpose in (None, each.purpose)]
        if request.query_params.get("order") == "asc":
            files.reverse()
        page, has_more = _page(request, files, MAX_FILES, MAX_FILES)
        return _listed([shown_file(each) for each in page], has_more)

    async def _file(self, request: Request) -> Response:
        return JSONResponse(shown_file(await self._found(request.path_params["file_id"])))

    async def _delete(self, request: Request) -> Response:
        file_id = request.path_params["file_id"]
        if not await self._run(self._store.delete_file, caller().tenant, file_id):
            raise _no_file(file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    async def _content(self, request: Request) -> Response:
        file = await self._found(request.path_params["file_id"])
        path = self._store.content(caller().tenant, file.id)
        return _Content(path, media_type="application/octet-stream", filename=file.filename)

    async def _found(self, file_id: str) -> StoredFile:
        file = await self._run(self._store.file, caller().tenant, file_id)
        if file is None:
            raise _no_file(file_id)
        return file

    # --- Batches

    async def _create(self, request: Request) -> Response:
        store, identity, reading = self._store, caller(), Reading(self._is_strict)
        body = await self._bodies.whole(request, _BODY_BYTES)
        try:
            asked = BatchRequest.model_validate_json(body, context=reading)
        except ValidationError as error:
            raise of_validation(error) from None
        file = await self._run(store.file, identity.tenant, asked.input_file_id)
        if file is None:
            message = f"input_file_id={asked.input_file_id[:80]!r} is not a file of yours: send it to /v1/files first"
            raise BadRequestError(message, param="input_file_id")
        now = int(time.time())
        record = Record(
            id=new_id("batch_"),
            tenant=identity.tenant,
            key_digest=identity.key_digest,
            endpoint=asked.endpoint,
            input_file_id=file.id,
            completion_window=asked.completion_window,
            created_at=now,
            expires_at=now + _DAY_S,
            metadata=asked.metadata,
            answers_id=new_id("file-"),
            problems_id=new_id("file-"),
        )
        await self._check_room(0)
        await self._forget_oldest()
        folder = store.batch_folder(identity.tenant, record.id)
        assert folder is not None
        batch = Batch(folder)
        await self._run(create, store, batch, record, store.content(identity.tenant, file.id))
        if self._runner is not None:
            self._runner.wake()
        answer = await self._shown(batch, record)
        self._ignored.tell(reading.ignored, answer)
        return answer

    async def _list(self, request: Request) -> Response:
        records = await self._run(self._records)
        page, has_more = _page(request, [record for _, record in records], _LIST_MOST, _LIST_DEFAULT)
        of_record = {record.id: batch for batch, record in records}
        return _listed([await self._json(of_record[each.id], each) for each in page], has_more)

    async def _show(self, request: Request) -> Response:
        return await self._shown(*await self._batch(request))

    async def _cancel(self, request: Request) -> Response:
        batch, record = await self._batch(request)
        if record.status in ENDED:
            message = f"the batch is {record.status}: only one that has not ended can be cancelled"
            raise BadRequestError(message, status=HTTPStatus.CONFLICT)
        await self._run(batch.cancel)
        if self._runner is not None:
            self._runner.wake()
        return await self._shown(batch, record)

    async def _batch(self, request: Request) -> tuple[Batch, Record]:
        """Raises BadRequestError."""
        batch_id = request.path_params["batch_id"]
        folder = self._store.batch_folder(caller().tenant, batch_id)
        record = None if folder is None else await self._run(Batch(folder).read)
        if folder is None or record is None:
            message = f"batch {batch_id[:80]!r} is not known here (any more)"
            raise BadRequestError(message, status=HTTPStatus.NOT_FOUND, code="batch_not_found")
        return Batch(folder), record

    def _records(self) -> list[tuple[Batch, Record]]:
        """The caller's batches, the newest first. For threads."""
        found: list[tuple[Batch, Record]] = []
        for folder in self._store.batch_folders(caller().tenant):
            batch = Batch(folder)
            try:
                record = batch.read()
            except OSError as error:
                # One that is damaged doesn't hide the others.
                log.error("%s", error)
                continue
            if record is not None:
                found.append((batch, record))
        return sorted(found, key=lambda each: (each[1].created_at, each[1].id), reverse=True)

    async def _forget_oldest(self) -> None:
        records = await self._run(self._records)
        if len(records) < MAX_BATCHES:
            return
        ended = [batch for batch, record in records if record.status in ENDED]
        if not ended:
            raise RouterFull(f"{len(records)} batches of yours have not ended: wait until one has")
        await self._run(ended[-1].remove)

    async def _shown(self, batch: Batch, record: Record) -> Response:
        return JSONResponse(await self._json(batch, record))

    async def _json(self, batch: Batch, record: Record) -> dict[str, Any]:
        store = self._store

        def shown() -> dict[str, Any]:
            files = (store.file(record.tenant, each) for each in (record.answers_id, record.problems_id))
            return batch.shown(record, *(each is not None for each in files))

        return await self._run(shown)

    async def _run(self, work: Any, *arguments: object) -> Any:
        """Raises Unavailable."""
        try:
            return await self._store.run(work, *arguments)
        except StoreError as error:
            raise Unavailable(f"files and batches can't be used now: {error}") from None


def _page(request: Request, all: Sequence[T], most: int, default: int) -> tuple[Sequence[T], bool]:
    """Returns the entries that a request for a list asks for, and whether there are more. Raises BadRequestError."""
    told, after = request.query_params.get("limit", str(default)), request.query_params.get("after")
    if not (told.isdecimal() and len(told) < 6 and 1 <= int(told) <= most):
        raise BadRequestError(f"limit={told[:80]!r}: use 1 to {most}", param="limit")
    first = 0
    if after is not None:
        places = [place for place, each in enumerate(all, 1) if each.id == after]
        if not places:
            raise BadRequestError(
                f"after={after[:80]!r} is not in the list: use the id of its last entry", param="after"
            )
        first = places[0]
    return all[first : first + int(told)], len(all) > first + int(told)


def _listed(entries: list[dict[str, Any]], has_more: bool) -> Response:
    ids = {"first_id": entries[0]["id"], "last_id": entries[-1]["id"]} if entries else {}
    content = msgspec.json.encode({"object": "list", "data": entries, "has_more": has_more, **ids})
    return Response(content, media_type="application/json")


def _no_file(file_id: str) -> BadRequestError:
    message = f"file {file_id[:80]!r} is not stored here (any more)"
    return BadRequestError(message, status=HTTPStatus.NOT_FOUND, code="file_not_found")
