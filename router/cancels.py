"""Cancels of requests whose streams other routers hold: the replicas that compute them know."""

from collections.abc import Sequence
from typing import Any

import grpc.aio

from protos.inference_pb2 import CancelRequest, CancelResponse
from protos.scheduler_pb2_grpc import SchedulerStub
from router.asking import ANSWER_TIMEOUT_S, Asked, ask_all


async def cancel_elsewhere(replicas: Sequence[Asked], scoped_id: str) -> bool:
    """Whether a replica had the request (Request.scoped_id), and has ended it. The router whose stream it is hears that
    from the replica, and ends the stream. Raises NoReplica if none answers."""

    async def ask(channel: grpc.aio.Channel) -> CancelResponse:
        # The generated stub's types are those of the synchronous one.
        stub: Any = SchedulerStub(channel)
        return await stub.Cancel(CancelRequest(request_id=scoped_id), timeout=ANSWER_TIMEOUT_S)

    answers, _ = await ask_all(replicas, ask)
    return any(answer.cancelled for answer in answers)
