"""Begins streams that live without a reader, and attaches readers to them."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from protos import inference_pb2 as pb
from router.errors import InvalidRequest, UnknownRequest
from router.intake.attach.held_streams import HeldStream, HeldStreams
from router.intake.attach.kept_stream import KeptStream
from router.intake.attach.positions import Kept
from router.intake.attach.transcript import Reader, Transcript
from router.intake.intake import Intake
from router.intake.validation import check_request_id
from router.security.identity import caller
from router.streams.stream import Stream

# Bounds GenerateRequest.detach_timeout and the option.
LONGEST_S = 3600.0
# What an event takes beside its contents.
_EVENT_BYTES = 256


class Attachments:
    def __init__(
        self, intake: Intake, held: HeldStreams, *, detach_timeout: float = 0.0, buffer_bytes: int = 2**22
    ) -> None:
        """detach_timeout, buffer_bytes: options detach_timeout and stream_buffer_bytes."""
        self.intake, self.held = intake, held
        self._detach_timeout = detach_timeout
        # The other half is for what waits in the outbox.
        self.kept_bytes = buffer_bytes // 2

    def timeout_of(self, message: pb.GenerateRequest) -> float:
        """Returns for how many seconds a request goes on without a reader. Raises InvalidRequest."""
        if not message.HasField("detach_timeout"):
            return self._detach_timeout
        seconds = message.detach_timeout
        if not 0 <= seconds <= LONGEST_S:
            raise InvalidRequest(f"detach_timeout={seconds:g}: use seconds from 0 to {LONGEST_S:g}")
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

        transcript = Transcript(take, _size_of, self.kept_bytes, places.drop)
        kept.on_end(transcript.note_end)
        request = stream.request
        held = HeldStream(
            scoped_id=request.scoped_id, tenant=request.tenant, timeout=seconds, protocol="grpc",
            transcript=transcript, end=kept.end, kept=places,
        )  # fmt: skip
        try:
            self.held.add(held)
        except BaseException:
            await kept.end()
            raise
        async with self.held.reading(held, 0) as reader:
            yield stream, reader

    @contextlib.asynccontextmanager
    async def attach(self, asked: pb.AttachRequest) -> AsyncIterator[Reader[pb.GenerateResponse]]:
        """Attaches a reader of the caller to a stream that was begun here. Raises RequestError."""
        check_request_id(asked.request_id)
        held = self.find(asked.request_id, caller().scoped_id(asked.request_id))
        transcript: Transcript[Any] = held.transcript
        if held.protocol != "grpc":
            raise InvalidRequest(
                f"request_id={asked.request_id!r} was asked for over HTTP: read it with GET "
                f"/v1/streams/{asked.request_id}"
            )
        lacking = held.kept.lacking(asked, transcript.items())
        async with self.held.reading(held, transcript.end, lacking) as reader:
            yield reader

    def find(self, request_id: str, scoped_id: str) -> HeldStream:
        """Returns a stream that was begun here. Raises UnknownRequest."""
        held = self.held.find(scoped_id)
        if held is None:
            raise UnknownRequest(
                f"request_id={request_id!r}: no stream of this id is held here (any more); those of requests with "
                "detach_timeout are. Resume with the tokens you have, or send it again"
            )
        return held


def _size_of(event: pb.GenerateResponse) -> int:
    return event.ByteSize() + _EVENT_BYTES
