"""Pauses all replicas for all routers, as vLLM's pause_generation does, and lets them go on."""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, Protocol

import grpc
import grpc.aio

from protos import scheduler_pb2 as wire
from protos.scheduler_pb2_grpc import SchedulerStub
from router.errors import InvalidRequest, NoReplica
from router.replicas.broadcast import ANSWER_TIMEOUT_S, BroadcastTarget, broadcast
from router.replicas.session import Session

# A replica's next message, which tells its state to this router, comes in milliseconds.
_TOLD_WITHIN_S = 2.0
_LOOK_S = 0.005
_REFUSALS = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT)


class PausedReplica(BroadcastTarget, Protocol):
    session: Session | None


async def pause(
    replicas: Sequence[PausedReplica], mode: wire.PauseMode, *, clear_cache: bool = False, seconds: float | None = None
) -> list[wire.PauseMode]:
    """Returns the mode of each replica, once all are in it and this router has been told.

    mode: UNSPECIFIED only asks. seconds: the time for it; None: no limit, because requests may take long to finish.
    Raises InvalidRequest, and NoReplica if one does not answer: the others are paused, or go on, even so.
    """
    refusals: list[str] = []

    async def ask(channel: grpc.aio.Channel) -> wire.PauseMode:
        # The generated stub's types are those of the synchronous one.
        stub: Any = SchedulerStub(channel)
        try:
            answer = await stub.Pause(wire.PauseRequest(mode=mode, clear_cache=clear_cache), timeout=seconds)
        except grpc.aio.AioRpcError as error:
            if error.code() in _REFUSALS:
                refusals.append(error.details() or "")
            raise
        return answer.mode

    try:
        modes, unreachable = await broadcast(replicas, ask)
    except NoReplica:
        if refusals:
            raise InvalidRequest(refusals[0]) from None
        raise
    if unreachable:
        raise NoReplica(f"{'; '.join(unreachable)}: the other {len(modes)} replicas have done it; try again")
    if mode != wire.PAUSE_MODE_UNSPECIFIED:
        await _until_told(replicas, mode)
    return modes


async def is_paused(replicas: Sequence[PausedReplica]) -> bool:
    """True if any replica is paused. Raises NoReplica if one does not answer."""
    modes = await pause(replicas, wire.PAUSE_MODE_UNSPECIFIED, seconds=ANSWER_TIMEOUT_S)
    return any(mode != wire.PAUSE_MODE_NONE for mode in modes)


async def _until_told(replicas: Sequence[PausedReplica], mode: wire.PauseMode) -> None:
    """Waits for the loads that say so: a request right after a resume must find a replica."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_TOLD_WITHIN_S):
            # A load is no event: replicas tell their watchers only those changes that matter to routing.
            while any(each.session is not None and each.session.load.paused != mode for each in replicas):  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_S)
