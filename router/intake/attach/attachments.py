"""Begins streams that live without a reader, and attaches readers to them."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from protos import inference_pb2 as pb
from router.errors import InvalidRequest, UnknownRequest
from router.intake.attach.held_streams import HeldStream, HeldStreams
from router.intake.attach.kept_stream import KeptStream
from router.intake.attach.positions import Kept
from router.intake.attach.transcript import Reader, Transcript
from router.intake.intake import Intake
from router.replicas.peers import Peers
from router.request.checks import check_detach_timeout, check_request_id
from router.security.identity import caller
from router.streams.outbox import bounded_reading, bounded_write
from router.streams.stream import Stream
from router.telemetry.call_context import log_fields

log = logging.getLogger("octavo.router.intake.attach")

# Memory of an event besides its bytes.
_EVENT_BYTES = 64


class Attachments:
    def __init__(
        self,
        intake: Intake,
        held: HeldStreams,
        *,
        detach_timeout: float = 0.0,
        buffer_bytes: int = 2**22,
        peers: Peers | None = None,
    ) -> None:
        """detach_timeout, buffer_bytes: options detach_timeout and stream_buffer_bytes. peers: None: there are none."""
        self.peers = Peers(()) if peers is None else peers
        self.intake, self.held = intake, held
        self._detach_timeout = detach_timeout
        # The other half is for what waits in the outbox.
        self.kept_bytes = buffer_bytes // 2
        self._telling: set[asyncio.Task[None]] = set()

    def timeout_of(self, message: pb.GenerateRequest) -> float:
        """Returns for how many seconds a request goes on without a reader. Raises InvalidRequest."""
        if not message.HasField("detach_timeout"):
            return self._detach_timeout
        seconds = message.detach_timeout
        check_detach_timeout(message)
        if seconds and not self.held.max_detached:
            raise InvalidRequest(
                f"detach_timeout={seconds:g}: this router holds no streams without a reader (max_detached_streams=0); "
                "leave it unset"
            )
        return seconds

    @contextlib.asynccontextmanager
    async def begin(
        self, message: pb.GenerateRequest, seconds: float
    ) -> AsyncIterator[tuple[Stream, Reader[pb.GenerateResponse]]]:
        """Begins a stream of the caller that goes on for `seconds` without a reader, with its first one.

        message: with a request_id; not held once the stream is open. Raises RequestError.
        """
        opening = KeptStream.open(self.intake, message)
        del message
        kept = await opening
        stream = kept.stream
        places = Kept(stream.request)

        async def take() -> list[pb.GenerateResponse]:
            return places.take(await stream.outbox.take())

        # A message takes several times the memory of its bytes.
        transcript = Transcript(
            take,
            _size_of,
            self.kept_bytes,
            places.drop,
            pack=pb.GenerateResponse.SerializeToString,
            unpack=pb.GenerateResponse.FromString,
        )
        kept.on_end(transcript.note_end)
        request = stream.request
        held = HeldStream(
            self.held,
            scoped_id=request.scoped_id,
            tenant=request.tenant,
            timeout=seconds,
            protocol="grpc",
            transcript=transcript,
            end=kept.end,
            kept=places,
        )
        try:
            self.held.add(held)
        except BaseException:
            await kept.end()
            raise
        if request.resume is not None:
            self._end_earlier_attempts(request.scoped_id)
        async with self.held.reading(held, 0) as reader:
            yield stream, reader

    def _end_earlier_attempts(self, scoped_id: str) -> None:
        """Has other routers forget a stream that a client has resumed here, so that nobody attaches to what they hold:
        they may not have noticed, if another replica computes it there."""

        async def tell() -> None:
            try:
                await self.peers.drop(scoped_id)
            except Exception:
                log.exception("other routers were not told of a resume", extra=log_fields(scoped_id))

        task = asyncio.create_task(tell())
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def attach(self, asked: pb.AttachRequest) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Yields what the caller lacks of a stream that was begun at any router, and then what comes. The stream's
        reader reads no faster than this is read. Raises RequestError."""
        check_request_id(asked.request_id)
        scoped_id = caller().scoped_id(asked.request_id)
        if self.held.find(scoped_id) is None and (found := await self.peers.find(scoped_id)) and found[1].held_over:
            if found[1].held_over != "grpc":
                raise _over_http(asked.request_id)
            at_peer = pb.AttachRequest()
            at_peer.CopyFrom(asked)
            at_peer.request_id = scoped_id
            async with contextlib.aclosing(self.peers.attach(found[0], at_peer)) as events:
                async for event in events:
                    with bounded_write():
                        yield event
            return
        async with self.attach_here(scoped_id, asked) as reader:
            with bounded_reading(reader):
                while events := await reader.take():
                    for event in events:
                        yield event

    @contextlib.asynccontextmanager
    async def attach_here(self, scoped_id: str, asked: pb.AttachRequest) -> AsyncIterator[Reader[pb.GenerateResponse]]:
        """Attaches a reader to a stream that was begun here. Raises RequestError."""
        request_id = scoped_id.rpartition("/")[2]
        held = self.find(request_id, scoped_id)
        transcript: Transcript[Any] = held.transcript
        if held.protocol != "grpc":
            raise _over_http(request_id)
        lacking = held.kept.lacking(asked, transcript.items())
        async with self.held.reading(held, transcript.end, lacking) as reader:
            yield reader

    def find(self, request_id: str, scoped_id: str) -> HeldStream:
        """Returns a stream that was begun here. Raises UnknownRequest."""
        held = self.held.find(scoped_id)
        if held is None:
            raise UnknownRequest(
                f"request_id={request_id!r}: no stream of this id is held (any more); those of requests with "
                "detach_timeout are. Resume with the tokens you have, or send it again"
            )
        return held


def _over_http(request_id: str) -> InvalidRequest:
    return InvalidRequest(
        f"request_id={request_id!r} was asked for over HTTP: read it with GET /v1/streams/{request_id}"
    )


def _size_of(event: bytes) -> int:
    return len(event) + _EVENT_BYTES
