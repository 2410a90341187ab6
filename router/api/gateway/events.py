"""The events of one stream, or of several at once."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from protos import inference_pb2 as pb
from router.errors import RequestError
from router.intake.attach.kept_stream import keeping
from router.intake.intake import Intake
from router.streams.outbox import Outbox

# A refusal takes a round trip to the scheduler. If the first token takes longer, the response's header waits this long.
_REFUSAL_S = 0.2

# The index of the message, and the event.
Event = tuple[int, pb.GenerateResponse]


def parse_outputs(intake: Intake, messages: Sequence[pb.GenerateRequest]) -> bool:
    """Sets parse_output where outputs can have reasoning or calls beside the answer. Returns True if any has it."""
    for message in messages:
        if message.HasField("chat") and not message.HasField("beam_search"):
            message.parse_output = intake.parses(message.chat)
    return any(message.parse_output for message in messages)


async def in_intervals(events: AsyncGenerator[Event, None], num_tokens: int) -> AsyncGenerator[Event, None]:
    """Joins chunks of a choice until they have num_tokens tokens, or the choice ends."""
    waiting: dict[tuple[int, int], pb.Chunk] = {}
    async with aclosing(events):
        async for prompt, event in events:
            if not event.HasField("chunk"):
                yield prompt, event
                continue
            place = prompt, event.chunk.index
            chunk = waiting.pop(place, None)
            if chunk is None:
                chunk = event.chunk
            else:
                # Lists are joined by MergeFrom; text and the first position are replaced.
                text, first_token = chunk.text, chunk.first_token
                chunk.MergeFrom(event.chunk)
                chunk.text, chunk.first_token = text + event.chunk.text, first_token
            if chunk.HasField("finish") or len(chunk.token_ids) >= num_tokens:
                yield prompt, pb.GenerateResponse(chunk=chunk)
            else:
                waiting[place] = chunk


async def events_of(
    intake: Intake, messages: list[pb.GenerateRequest], *, are_kept: bool = False, is_whole: bool = False
) -> AsyncGenerator[Event, None]:
    """Yields the events of all messages, which are taken out of the list: they may be large, and streams may last.
    Closing it ends the streams. are_kept: they may stay unread. is_whole: they become one answer.

    Raises RequestError. If one of several streams fails, the others end, as in vLLM, and the error names its prompt.
    """
    count = len(messages)
    if count == 1:
        async with aclosing(_events(intake, messages, are_kept=are_kept, is_whole=is_whole)) as events:
            async for event in events:
                yield 0, event
        return
    queue: asyncio.Queue[tuple[int, pb.GenerateResponse | Exception | None]] = asyncio.Queue(1)

    async def pass_on(index: int, message: list[pb.GenerateRequest]) -> None:
        try:
            async with aclosing(_events(intake, message, are_kept=are_kept, is_whole=is_whole)) as events:
                async for event in events:
                    await queue.put((index, event))
            await queue.put((index, None))
        except RequestError as error:
            # Kept at the end: clients know a field by the message's beginning.
            error.args = (f"{error} (prompt {index + 1} of {count}; the other prompts end with it)",)
            await queue.put((index, error))
        except Exception as error:  # noqa: BLE001 - the reader of the queue raises it
            await queue.put((index, error))

    tasks = [asyncio.create_task(pass_on(index, [messages.pop(0)])) for index in range(count)]
    num_open = len(tasks)
    try:
        while num_open:
            index, event = await queue.get()
            if isinstance(event, Exception):
                raise event
            if event is None:
                num_open -= 1
            else:
                yield index, event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _events(
    intake: Intake, message: list[pb.GenerateRequest], *, are_kept: bool, is_whole: bool
) -> AsyncGenerator[pb.GenerateResponse, None]:
    """message: one, which is taken out."""
    async with keeping(intake, message.pop()) if are_kept else intake.open(message.pop(), None) as stream:
        if is_whole:
            stream.outbox.collect()
        events = await _first_of(stream.outbox)
        while events:
            for event in events:
                yield event
            events = await stream.outbox.take()


async def _first_of(outbox: Outbox) -> list[pb.GenerateResponse]:
    """Returns Started and what comes right behind it: a replica's refusal there can still set the HTTP status."""
    events = await outbox.take()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_REFUSAL_S):
            events += await outbox.take()
    return events
