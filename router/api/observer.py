"""Shows people who watch the cluster what this router and its replicas know of this moment."""

import asyncio
import secrets
import time
from collections.abc import Iterable
from typing import Any

import grpc
import grpc.aio

from protos import admin_pb2 as pb
from protos.admin_pb2_grpc import AdminStub
from router.replicas.replica import Replica
from router.replicas.replica_set import ReplicaSet
from router.security.identity import Identity, caller
from router.streams.registry import StreamRegistry
from router.streams.states import StreamState
from router.streams.stream import Stream
from router.telemetry.event_log import EventLog
from router.telemetry.metrics import RouterMetrics
from runtime.telemetry.histograms import Buckets, read
from runtime.wire import octavo_version

# A replica that answers later is shown as the router's own Session tells it.
_ANSWER_S = 1.0
_MOST_REQUESTS = 256


class Observer:
    """Nothing happens here until somebody asks."""

    def __init__(self, model_name: str, replicas: ReplicaSet, streams: StreamRegistry, metrics: RouterMetrics) -> None:
        self._model_name, self._replicas, self._streams, self._metrics = model_name, replicas, streams, metrics
        self._router_id = secrets.token_hex(8)
        self._started = time.monotonic()

    @property
    def events(self) -> EventLog:
        return self._metrics.events

    async def observe(self) -> pb.ObserveResponse:
        """Returns what the caller may see: all, or its own requests."""
        return await self.observe_as(caller())

    async def observe_as(self, identity: Identity) -> pb.ObserveResponse:
        """Returns what this caller may see."""
        view = self.own_requests(identity)
        if identity.is_admin:
            view.replicas.extend(await asyncio.gather(*map(_look_at, self._replicas.replicas)))
            self._add_figures(view.router)
        return view

    def own_requests(self, identity: Identity) -> pb.ObserveResponse:
        """Returns the requests that a caller may see, without asking a replica."""
        streams = [each for each in self._streams if not each.done]
        if not identity.is_admin:
            streams = [each for each in streams if each.request.tenant == identity.tenant]
        streams.sort(key=lambda stream: stream.request.arrival)
        now = time.monotonic()
        return pb.ObserveResponse(
            router=pb.RouterView(
                router_id=self._router_id,
                version=octavo_version(),
                model=self._model_name,
                uptime=now - self._started,
            ),
            requests=[_request_view(each, now, identity) for each in streams[:_MOST_REQUESTS]],
            num_requests=len(streams),
        )

    def _add_figures(self, router: pb.RouterView) -> None:
        metrics = self._metrics
        router.num_streams = len(self._streams)
        router.num_parked_streams = int(_value(metrics.parked_streams))
        router.num_prompt_tokens = int(_value(metrics.prompt_tokens))
        router.num_output_tokens = int(_value(metrics.generation_tokens))
        router.num_resubmissions = int(_value(metrics.resubmissions))
        router.time_to_first_token.CopyFrom(_buckets(read(metrics.time_to_first_token)))
        router.inter_token_latency.CopyFrom(_buckets(read(metrics.inter_token_latency)))
        router.lag.CopyFrom(_buckets(read(metrics.lag)))


async def _look_at(replica: Replica) -> pb.ReplicaView:
    view = await _ask(replica)
    view.address, view.state, view.description = replica.address, replica.state, replica.describe()
    return view


async def _ask(replica: Replica) -> pb.ReplicaView:
    if replica.session is not None and replica.channel is not None:
        # The generated stub's types are those of the synchronous one.
        stub: Any = AdminStub(replica.channel)
        try:
            (view,) = (await stub.Observe(pb.ObserveRequest(), timeout=_ANSWER_S)).replicas
        except (grpc.aio.AioRpcError, ValueError):
            # An older scheduler, or a busy one.
            return _from_session(replica)
        return view
    return pb.ReplicaView()


def _from_session(replica: Replica) -> pb.ReplicaView:
    """Returns what the latest Load and Welcome tell."""
    session = replica.session
    if session is None:
        return pb.ReplicaView()
    load, model = session.load, session.welcome.model
    return pb.ReplicaView(
        replica_id=session.welcome.replica_id,
        epoch=session.welcome.epoch,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_queued_tokens=load.num_queued_tokens,
        max_num_seqs=session.welcome.max_num_seqs,
        num_blocks=load.num_blocks,
        num_available_blocks=load.num_free_blocks,
        block_size=model.block_size,
    )


def _request_view(stream: Stream, now: float, identity: Identity) -> pb.RequestView:
    request, first = stream.request, stream.first_token_at
    is_own = request.tenant == identity.tenant
    return pb.RequestView(
        request_id=request.request_id if is_own else request.scoped_id,
        replica_id=stream.placement.replica if stream.placement.state is StreamState.PLACED else "",
        num_prompt_tokens=len(request.prompt_token_ids),
        num_output_tokens=stream.num_output_tokens,
        max_tokens=request.sampling.max_tokens * max(request.sampling.n, 1),
        age=now - request.arrival,
        time_to_first_token=-1.0 if first is None else first - request.arrival,
        num_resubmissions=stream.placement.num_resubmissions,
        is_parked=stream.placement.state is StreamState.PARKED,
    )


def _value(metric: Any) -> float:
    """Returns the value of a metric without labels."""
    samples: Iterable[Any] = (sample for family in metric.collect() for sample in family.samples)
    return next(sample.value for sample in samples if not sample.name.endswith("_created"))


def _buckets(buckets: Buckets) -> pb.HistogramView:
    return pb.HistogramView(bounds=buckets.bounds, counts=buckets.counts)
