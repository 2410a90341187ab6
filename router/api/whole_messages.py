"""Answers of gRPC calls that come whole: one message, made in pieces of its wire form.

A large message takes 100 bytes of memory for each logprob, and a call of C to serialize that holds the event loop. Its
wire form takes 20, and wire forms that follow each other are the message of them all.
"""

import asyncio
from array import array
from collections.abc import Callable
from typing import Any, TypeVar

import grpc.aio

from protos import inference_pb2 as pb
from router.streams.outbox import bounded_write
from router.streams.whole_answers import AnswerRoom

# Bytes of one answer. gRPC copies it at once: 30 ms.
MESSAGE_BYTES = 32 * 2**20
# What is copied on the event loop.
_SMALL_BYTES = 2**20
_PART_BYTES = 64 * 1024
# Tags of wire type 2 (length-delimited).
_CHOICES_TAG = pb.GenerateResult.CHOICES_FIELD_NUMBER << 3 | 2

Answer = TypeVar("Answer", bound=Callable[..., Any])


def writes_answer(method: Answer) -> Answer:
    """Marks the method of a unary call that writes its answer itself (`write_whole`), instead of returning it."""
    method.writes_answer = True  # type: ignore[attr-defined]
    return method


async def write_whole(parts: list[bytes], context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Writes a message, of whose parts nothing is left. A client that reads nothing for UNREAD_S ends the call."""
    # The interpreter's lock is not held while large parts are joined.
    is_small = sum(map(len, parts)) <= _SMALL_BYTES
    message = b"".join(parts) if is_small else await asyncio.to_thread(b"".join, parts)
    parts.clear()
    with bounded_write():
        await context.write(message)


class _Wire:
    """The wire form of a message that grows."""

    __slots__ = ("_full", "_last", "_room")

    def __init__(self, room: AnswerRoom) -> None:
        self._room = room
        self._full: list[bytes] = []
        self._last = bytearray()

    def add(self, data: bytes) -> None:
        self._room.grow(len(data))
        self._last += data
        if len(self._last) >= _PART_BYTES:
            self._full.append(bytes(self._last))
            self._last.clear()

    def take_parts(self) -> list[bytes]:
        return [*self._full, bytes(self._last)]


class _Choice:
    """A choice without its logprobs. A message that grew would keep a copy of its text for each chunk."""

    def __init__(self, index: int) -> None:
        self._own = pb.Choice(index=index, exact=True)
        self._token_ids = array("I")
        self._texts: dict[str, list[str]] = {"text": [], "content": [], "reasoning": []}
        self._arguments: list[list[str]] = []

    def add(self, chunk: pb.Chunk) -> None:
        own = self._own
        own.exact = chunk.exact
        self._token_ids.extend(chunk.token_ids)
        self._texts["text"].append(chunk.text)
        for delta in chunk.deltas:
            self._texts["content"].append(delta.content)
            self._texts["reasoning"].append(delta.reasoning)
            if delta.HasField("tool_call"):
                piece = delta.tool_call
                if piece.index == len(self._arguments):
                    own.tool_calls.add(id=piece.id, name=piece.name)
                    self._arguments.append([])
                self._arguments[piece.index].append(piece.arguments)
        if chunk.HasField("finish"):
            own.finish.CopyFrom(chunk.finish)

    def message(self) -> pb.Choice:
        own = self._own
        own.token_ids.extend(self._token_ids)
        for name, texts in self._texts.items():
            setattr(own, name, "".join(texts))
        for call, arguments in zip(own.tool_calls, self._arguments, strict=True):
            call.arguments = "".join(arguments)
        return own


class WholeResult:
    """The GenerateResult that a stream's events add up to."""

    def __init__(self, num_choices: int, room: AnswerRoom) -> None:
        self._own, self._prompt_logprobs = pb.GenerateResult(), _Wire(room)
        # Each choice, and its logprobs.
        self._choices = [(_Choice(index), _Wire(room)) for index in range(num_choices)]
        self._room = room

    def add(self, event: pb.GenerateResponse) -> None:
        """Raises RequestError."""
        match event.WhichOneof("event"):
            case "started":
                self._own.started.CopyFrom(event.started)
            case "prompt_logprobs":
                logprobs = event.prompt_logprobs.logprobs
                self._prompt_logprobs.add(pb.GenerateResult(prompt_logprobs=logprobs).SerializeToString())
            case "finished":
                self._own.usage.CopyFrom(event.finished.usage)
            case "chunk":
                chunk = event.chunk
                choice, scored = self._choices[chunk.index]
                if chunk.logprobs:
                    scored.add(pb.Choice(logprobs=chunk.logprobs).SerializeToString())
                # Texts of deltas are those of the chunk once more.
                self._room.grow(len(chunk.text) * (2 if chunk.deltas else 1) + 4 * len(chunk.token_ids))
                choice.add(chunk)

    def take_parts(self) -> list[bytes]:
        """Returns the message's wire form, once."""
        parts = [self._own.SerializeToString(), *self._prompt_logprobs.take_parts()]
        for choice, scored in self._choices:
            of_choice = [choice.message().SerializeToString(), *scored.take_parts()]
            parts += (_length_delimited(_CHOICES_TAG, sum(map(len, of_choice))), *of_choice)
        return parts


def _length_delimited(tag: int, size: int) -> bytes:
    """Returns what precedes the bytes of a submessage. tag: below 128."""
    shown = bytearray([tag])
    while size >= 0x80:
        shown.append(size & 0x7F | 0x80)
        size >>= 7
    shown.append(size)
    return bytes(shown)
