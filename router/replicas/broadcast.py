"""Asks all replicas a question at once, such as to cancel a request whose stream another router holds."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import grpc.aio

from protos.inference_pb2 import CancelRequest, CancelResponse
from protos.scheduler_pb2_grpc import SchedulerStub
from router.errors import NoReplica

if TYPE_CHECKING:
    # A module above asks through this one.
    from router.replicas.replica import Replica

# A scheduler answers between two steps; one that takes longer counts as unreachable.
ANSWER_TIMEOUT_S = 5.0

Answer = TypeVar("Answer")


async def broadcast(
    replicas: Sequence["Replica"], ask: Callable[[grpc.aio.Channel], Awaitable[Answer]]
) -> tuple[list[Answer], list[str]]:
    """Returns the answers, and the address and the cause for each replica without one.

    Raises NoReplica if there is no answer at all.
    """

    async def ask_one(replica: "Replica") -> Answer | str:
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


async def broadcast_cancel(replicas: Sequence["Replica"], scoped_id: str) -> CancelResponse:
    """Ends all attempts of a request (Request.scoped_id) that replicas have, and returns the newest. A replica tells
    the router that holds the stream, which ends it. Raises NoReplica if none answers."""

    async def ask(channel: grpc.aio.Channel) -> CancelResponse:
        # The generated stub's types are those of the synchronous one.
        stub: Any = SchedulerStub(channel)
        return await stub.Cancel(CancelRequest(request_id=scoped_id), timeout=ANSWER_TIMEOUT_S)

    answers, _ = await broadcast(replicas, ask)
    return newest(answers)


def newest(answers: Iterable[CancelResponse]) -> CancelResponse:
    """Returns the answer about the newest attempt. An empty one knows of none."""
    return max(answers, key=lambda answer: (answer.attempt, answer.cancelled))
