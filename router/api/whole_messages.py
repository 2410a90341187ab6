"""Answers of gRPC calls that come whole: one message, made in pieces of its wire form.

A large message takes 100 bytes of memory for each logprob, and a call of C to serialize that holds the event loop. Its
wire form takes 20, and wire forms that follow each other are the message of them all.
"""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import grpc.aio

from protos import inference_pb2 as pb
from router.intake.whole_answers import AnswerRoom
from router.streams.outbox import bounded_write

# Of one answer. gRPC copies it at once: 30 ms.
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


class WholeResult:
    """The GenerateResult that a stream's events add up to."""

    def __init__(self, num_choices: int, room: AnswerRoom) -> None:
        self._own, self._prompt_logprobs = pb.GenerateResult(), _Wire(room)
        # Of each choice its logprobs, and the rest.
        self._choices = [(pb.Choice(index=index, exact=True), _Wire(room)) for index in range(num_choices)]
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
                self._add_chunk(event.chunk)

    def _add_chunk(self, chunk: pb.Chunk) -> None:
        choice, logprobs = self._choices[chunk.index]
        if chunk.logprobs:
            logprobs.add(pb.Choice(logprobs=chunk.logprobs).SerializeToString())
        self._room.grow(len(chunk.text) + 4 * len(chunk.token_ids))
        choice.text += chunk.text
        choice.token_ids.extend(chunk.token_ids)
        choice.exact = chunk.exact
        for delta in chunk.deltas:
            _add_delta(choice, delta)
        if chunk.HasField("finish"):
            choice.finish.CopyFrom(chunk.finish)

    def parts(self) -> list[bytes]:
        """Returns the message's wire form."""
        parts = [self._own.SerializeToString(), *self._prompt_logprobs.take_parts()]
        for choice, logprobs in self._choices:
            of_choice = [choice.SerializeToString(), *logprobs.take_parts()]
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


def _add_delta(choice: pb.Choice, delta: pb.Delta) -> None:
    choice.content += delta.content
    choice.reasoning += delta.reasoning
    if delta.HasField("tool_call"):
        piece = delta.tool_call
        if piece.index == len(choice.tool_calls):
            choice.tool_calls.add(id=piece.id, name=piece.name)
        choice.tool_calls[piece.index].arguments += piece.arguments
