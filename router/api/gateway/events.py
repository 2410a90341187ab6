"""The events of one stream, or of several at once."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from protos import inference_pb2 as pb
from router.intake.intake import Intake
from router.streams.outbox import Outbox

# A refusal takes a round trip to the scheduler. If the first token takes longer, the response's header waits this long.
_REFUSAL_S = 0.2

# The index of the message, and the event.
Event = tuple[int, pb.GenerateResponse]


async def events_of(intake: Intake, messages: Sequence[pb.GenerateRequest]) -> AsyncGenerator[Event, None]:
    """Yields the events of all messages. Closing it ends the streams. Raises RequestError."""
    if len(messages) == 1:
        async with aclosing(_events(intake, messages[0])) as events:
            async for event in events:
                yield 0, event
        return
    queue: asyncio.Queue[tuple[int, pb.GenerateResponse | Exception | None]] = asyncio.Queue(1)

    async def pass_on(index: int, message: pb.GenerateRequest) -> None:
        try:
            async with aclosing(_events(intake, message)) as events:
                async for event in events:
                    await queue.put((index, event))
            await queue.put((index, None))
        except Exception as error:  # noqa: BLE001 - the reader of the queue raises it
            await queue.put((index, error))

    tasks = [asyncio.create_task(pass_on(index, message)) for index, message in enumerate(messages)]
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


async def _events(intake: Intake, message: pb.GenerateRequest) -> AsyncGenerator[pb.GenerateResponse, None]:
    async with intake.open(message, None) as stream:
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
