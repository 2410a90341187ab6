"""The Admin service of one scheduler. Questions go to the step loop, because only its thread may touch the core."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import grpc
import grpc.aio

from protos import admin_pb2 as pb
from protos.admin_pb2_grpc import AdminServicer
from scheduler.core.messages import Timeline
from scheduler.sessions.commands import Command, Explain, ResetPrefixCache

SERVICE = pb.DESCRIPTOR.services_by_name["Admin"].full_name

Context = grpc.aio.ServicerContext
Answer = TypeVar("Answer")

# Time for an answer of the step loop, which takes commands between two steps.
ANSWER_S = 10.0
# The latest timelines of one request_id to return. This many of the longest fit into one message to a router
# (SESSION_MESSAGE_BYTES).
_MAX_TIMELINES = 32


class AdminService(AdminServicer):
    """Answers for one replica, given by number. `put` sends commands to its step loop."""

    def __init__(self, replica: int, put: Callable[[Command], None]) -> None:
        self._replica_id = str(replica)
        self._put = put

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:
        if not request.request_id:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "request_id is empty: give that of a request")
        question = Explain(request_id=request.request_id)
        self._put(question)
        timelines, now = await answer_of(question.answer, context)
        if not timelines:
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"request_id={request.request_id!r}: replica {self._replica_id} does not know it; it keeps live "
                f"requests and the latest that have finished since it started",
            )
        latest = timelines[-_MAX_TIMELINES:]
        return pb.ExplainResponse(timelines=[timeline_message(timeline, self._replica_id, now) for timeline in latest])

    async def ResetPrefixCache(
        self, request: pb.ResetPrefixCacheRequest, context: Context
    ) -> pb.ResetPrefixCacheResponse:
        order = ResetPrefixCache()
        self._put(order)
        return pb.ResetPrefixCacheResponse(num_blocks=await answer_of(order.answer, context))

    async def Migrate(self, request: pb.MigrateRequest, context: Context) -> pb.MigrateResponse:
        await context.abort(
            grpc.StatusCode.UNIMPLEMENTED, "a scheduler knows no other replica: ask the router that streams the request"
        )


async def answer_of(future: Future[Answer], context: Context) -> Answer:
    """Waits for the step loop's answer, and ends the call with UNAVAILABLE if there is none."""
    try:
        async with asyncio.timeout(ANSWER_S):
            return await asyncio.wrap_future(future)
    except TimeoutError:
        await context.abort(
            grpc.StatusCode.UNAVAILABLE, f"the step loop has not answered for {ANSWER_S:g} s: it hangs, or has ended"
        )
    raise AssertionError("unreachable")


def timeline_message(timeline: Timeline, replica_id: str, now: float) -> pb.RequestTimeline:
    began = timeline.entries[0].time
    return pb.RequestTimeline(
        request_id=timeline.request_id,
        replica_id=replica_id,
        entries=[
            pb.TimelineEntry(
                moment=entry.moment.value,
                time=round(entry.time - began, 6),
                choice=entry.choice,
                step=entry.step,
                num_tokens=entry.num_tokens,
                reason=entry.reason,
            )
            for entry in timeline.entries
        ],
        num_dropped=timeline.num_dropped,
        finished=timeline.is_finished,
        now=round(now - began, 6),
        num_draft_tokens=timeline.num_draft_tokens,
        num_accepted_tokens=timeline.num_accepted_tokens,
    )
