"""The Admin service of one scheduler. Questions go to the step loop, because only its thread may touch the core."""

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TypeVar

import grpc
import grpc.aio

from protos import admin_pb2 as pb
from protos.admin_pb2_grpc import AdminServicer
from runtime.telemetry.histograms import Buckets, Collects, read
from scheduler.core.messages import Timeline
from scheduler.sessions.commands import Command, Explain, Observe, ResetPrefixCache
from scheduler.sessions.observation import Observation

SERVICE = pb.DESCRIPTOR.services_by_name["Admin"].full_name

Context = grpc.aio.ServicerContext
Answer = TypeVar("Answer")
View = TypeVar("View", pb.RankView, pb.StepView, pb.SequenceView)

# Time for an answer of the step loop, which takes commands between two steps.
ANSWER_S = 10.0
# The latest timelines of one request_id to return. This many of the longest fit into one message to a router
# (SESSION_MESSAGE_BYTES).
_MAX_TIMELINES = 32


class AdminService(AdminServicer):
    """Answers for one replica, given by number. `put` sends commands to its step loop."""

    def __init__(self, replica: int, put: Callable[[Command], None], *, step_seconds: Collects, lag: Collects) -> None:
        """step_seconds, lag: histograms of the step loop."""
        self._replica_id = str(replica)
        self._put = put
        self._step_seconds, self._lag = step_seconds, lag

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

    async def Observe(self, request: pb.ObserveRequest, context: Context) -> pb.ObserveResponse:
        question = Observe()
        self._put(question)
        seen = await answer_of(question.answer, context)
        view = replica_view(seen, self._replica_id)
        view.totals.step_seconds.CopyFrom(_buckets(read(self._step_seconds)))
        view.totals.lag.CopyFrom(_buckets(read(self._lag, thread="step_loop")))
        return pb.ObserveResponse(replicas=[view])

    async def Hold(self, request: pb.HoldRequest, context: Context) -> pb.HoldResponse:
        await context.abort(
            grpc.StatusCode.UNIMPLEMENTED, "Hold is a router's call: a router stops sending requests to this replica"
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


def replica_view(seen: Observation, replica_id: str) -> pb.ReplicaView:
    """Returns the message, without its histograms."""
    load, stats, look = seen.load, seen.stats, seen.look
    state = "draining" if seen.draining else "ready" if seen.workers_ready else "loading"
    view = pb.ReplicaView(
        replica_id=replica_id,
        state=state,
        description=seen.workers,
        is_observed=True,
        epoch=seen.epoch,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_queued_tokens=load.num_queued_tokens + load.num_prefill_tokens,
        max_num_seqs=seen.max_num_seqs,
        max_num_batched_tokens=seen.max_num_batched_tokens,
        num_blocks=load.num_blocks,
        num_available_blocks=load.num_free_blocks,
        block_size=seen.block_size,
        totals=pb.ReplicaTotals(
            num_prompt_tokens=stats.num_prompt_tokens,
            num_output_tokens=stats.num_output_tokens,
            num_preemptions=stats.num_preemptions,
            num_prefix_queries=stats.num_prefix_queries,
            num_prefix_hits=stats.num_prefix_hits,
            num_speculated_tokens=stats.num_speculated_tokens,
            num_accepted_tokens=sum(stats.num_accepted_by_position),
            num_steps=stats.num_steps,
        ),
        ranks=_messages(pb.RankView, seen.ranks),
        steps=_messages(pb.StepView, seen.steps),
    )
    if look is not None:
        view.num_cached_blocks, view.used_blocks, view.cached_blocks = look.num_cached_blocks, look.used, look.cached
        view.sequences.extend(_messages(pb.SequenceView, look.sequences))
    return view


def _messages(kind: type[View], seen: Iterable[object]) -> list[View]:
    """Returns messages with the fields of objects that mirror them. dataclasses.asdict takes several times as long."""
    names = [field.name for field in kind.DESCRIPTOR.fields]
    return [kind(**{name: getattr(each, name) for name in names}) for each in seen]


def _buckets(buckets: Buckets) -> pb.HistogramView:
    return pb.HistogramView(bounds=buckets.bounds, counts=buckets.counts)
