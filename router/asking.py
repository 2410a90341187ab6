"""How a router asks all of its replicas a question."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

import grpc.aio

from router.errors import NoReplica

# A scheduler answers between two steps; one that takes longer counts as unreachable.
ANSWER_TIMEOUT_S = 5.0

Answer = TypeVar("Answer")


class Asked(Protocol):
    """A replica."""

    address: str
    # None until something has been tried.
    channel: grpc.aio.Channel | None


async def ask_all(
    replicas: Sequence[Asked], ask: Callable[[grpc.aio.Channel], Awaitable[Answer]]
) -> tuple[list[Answer], list[str]]:
    """The answers, and for each replica without one its address and the cause.

    Raises NoReplica if there is no answer at all.
    """

    async def ask_one(replica: Asked) -> Answer | str:
        if replica.channel is None:
            return f"{replica.address}: not connected yet"
        try:
            return await ask(replica.channel)
        except grpc.aio.AioRpcError as error:
            return f"{replica.address}: {error.code().name}, {error.details()}"

    outcomes = await asyncio.gather(*map(ask_one, replicas))
    unreachable = [outcome for outcome in outcomes if isinstance(outcome, str)]
    answers = [outcome for outcome in outcomes if not isinstance(outcome, str)]
    if not answers:
        raise NoReplica(f"no replica answers: {'; '.join(unreachable)}; try again in a few seconds")
    return answers, unreachable
