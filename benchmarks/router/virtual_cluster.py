"""A router and its replicas under one virtual clock: real decisions, and workers that only take time.

The policy, the router's Session, the scheduler's sessions, core and prefix cache, and the messages between them are
the real ones, serialized as on the wire. A worker is `PaperRows`: it follows plans, counts, and takes as long for a
step as a time model says. So a run is exact and repeatable, whatever other work the machine has.
"""

import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from octavo.plan.costs.step_shape import PaperRows, StepShape
from protos.inference_pb2 import ModelInfo, SamplingParams
from protos.scheduler_pb2 import (
    REJECT_REASON_QUEUE_FULL,
    RouterMessage,
    SchedulerMessage,
    SequenceStart,
    Submit,
    Welcome,
)
from router.accepted import RoutingHints
from router.replicas.policies import Policy, ReplicaLoad
from router.replicas.session import Session
from runtime.wire import PROTOCOL_VERSION
from scheduler.core.core import Core
from scheduler.core.messages import CoreSettings, Result
from scheduler.ranks.step_wire import StepTotals
from scheduler.sessions.commands import OpenSession, SubmitGroup
from scheduler.sessions.requests import Requests
from scheduler.sessions.submissions import Intake

VOCAB_SIZE = 128_000
# Each replica has only one router, so only one Session.
_SESSION = 1
# Seconds of a message through gRPC between two busy processes: from router to scheduler, or back.
_HOP_S = 0.0005
# A dummy owner of groups. It is never called: each group is left as soon as it is submitted, and outputs are read from
# the messages themselves.
_NOBODY: Any = SimpleNamespace(stream=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step: a fixed part, and parts for each prompt token and each sequence in it."""

    step_s: float = 0.008
    prompt_token_s: float = 20e-6
    sequence_s: float = 50e-6

    def seconds(self, shape: StepShape) -> float:
        num_sequences = shape.num_decodes + shape.num_chunks
        return self.step_s + shape.num_prefill_tokens * self.prompt_token_s + num_sequences * self.sequence_s


@dataclass(slots=True)
class Request:
    """A request and its outcome. at: when it comes, in seconds; with bounded concurrency, when there is room for it."""

    at: float
    token_ids: Sequence[int]
    num_output_tokens: int
    tenant: str = ""
    weight: float = 1.0
    # Filled in as it is served.
    was_refused: bool = False
    first_token_at: float = 0.0
    ended_at: float = 0.0
    num_cached_tokens: int = 0

    @property
    def ttft(self) -> float:
        return self.first_token_at - self.at

    @property
    def latency(self) -> float:
        return self.ended_at - self.at


class VirtualCluster:
    """A cluster for one run; make another one for another run."""

    def __init__(self, policy: Policy, *, num_replicas: int, settings: CoreSettings, step_time: StepTime) -> None:
        self._policy = policy
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._waiting: deque[Request] = deque()
        self._replicas = [_Replica(i, self, settings, step_time) for i in range(num_replicas)]
        # Seconds that this machine took to choose replicas; and choices by reason.
        self.choosing_s = 0.0
        self.reasons: dict[str, int] = {}

    def serve(self, requests: Iterable[Request], *, concurrency: int = 0) -> None:
        """Serves all requests to their ends. concurrency: how many run at a time; `at` is then set to when each comes.
        0: each comes at its `at`."""
        self._waiting.extend(requests)
        if concurrency:
            for _ in range(min(concurrency, len(self._waiting))):
                self._next(0.0)
        else:
            while self._waiting:
                request = self._waiting.popleft()
                self.at(request.at, partial(self._place, request))
        while self._events:
            now, _, event = heapq.heappop(self._events)
            event(now)

    def at(self, when: float, event: Callable[[float], None]) -> None:
        """Calls `event` at that time, with the time."""
        heapq.heappush(self._events, (when, next(self._order), event))

    def ended(self, request: Request, now: float) -> None:
        request.ended_at = now
        self._next(now)

    def refused(self, request: Request, now: float) -> None:
        request.was_refused = True
        self.ended(request, now)

    def told(self, replica: int, message: SchedulerMessage) -> None:
        """Passes a replica's cache events on to the policy, if it wants them."""
        if self._policy.prefix_index is not None:
            self._policy.prefix_index.apply(replica, message.cache_events)

    def watch(self, replica: int, model: ModelInfo) -> bool:
        """Adds a replica; returns whether the policy wants its cache events."""
        if self._policy.prefix_index is None:
            return False
        self._policy.prefix_index.add(replica, block_size=model.block_size, max_blocks=model.num_blocks)
        return True

    def _next(self, now: float) -> None:
        if self._waiting:
            request = self._waiting.popleft()
            request.at = now
            self._place(request, now)

    def _place(self, request: Request, now: float) -> None:
        loads = [replica.load for replica in self._replicas]
        began = time.perf_counter()
        index, reason = self._policy.choose(loads, RoutingHints(token_ids=request.token_ids))
        self.choosing_s += time.perf_counter() - began
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        if self._replicas[index].session.refuses(0, request.tenant):
            self.refused(request, now)
        else:
            self._replicas[index].submit(request, now)


@dataclass(slots=True)
class _Replica:
    number: int
    cluster: VirtualCluster
    settings: CoreSettings
    step_time: StepTime
    # The router's side: its Session, and the request of each group.
    session: Session = field(init=False)
    submitted: dict[int, Request] = field(default_factory=dict)
    # The scheduler's and the workers' side.
    requests: Requests = field(default_factory=Requests)
    intake: Intake = field(init=False)
    core: Core = field(init=False)
    rows: PaperRows = field(init=False)
    busy_until: float = 0.0

    def __post_init__(self) -> None:
        settings = self.settings
        model = ModelInfo(
            name="paper",
            vocab_size=VOCAB_SIZE,
            max_model_len=settings.max_model_len,
            block_size=settings.block_size,
            num_blocks=settings.num_blocks,
        )
        welcome = Welcome(protocol_version=PROTOCOL_VERSION, replica_id=str(self.number), epoch=1, model=model)
        self.session = Session(welcome)
        self.core = Core(settings)
        self.rows = PaperRows(settings.max_num_seqs)
        self.intake = Intake(_SESSION, model, max_unsent_tokens=settings.max_queued_tokens)
        self.requests.begin_epoch(self.core, welcome)
        self.requests.handle(OpenSession(session=_SESSION, watch_cache=self.cluster.watch(self.number, model)), 0.0)
        self._advance(0.0)

    # --- The router's side

    @property
    def load(self) -> ReplicaLoad:
        session = self.session
        return ReplicaLoad(
            replica=self.number,
            num_sequences=session.num_sequences,
            num_queued_tokens=session.num_queued_tokens,
            workers_ready=session.load.workers_ready,
        )

    def submit(self, request: Request, now: float) -> None:
        sampling = SamplingParams(max_tokens=request.num_output_tokens, ignore_eos=True)
        submit = Submit(
            request_id=str(id(request)),
            choices=[SequenceStart(choice=0)],
            attempt=1,
            sampling=sampling,
            tenant=request.tenant,
            weight=request.weight,
        )
        group = self.session.submit(submit, request.token_ids, owner=_NOBODY)
        self.session.leave(group)
        self.submitted[group] = request
        while not self.session.outgoing.empty():
            message = self.session.outgoing.get_nowait()
            assert isinstance(message, RouterMessage), "these requests have no items"
            self.cluster.at(now + _HOP_S, partial(self._receive, message))

    def _hear(self, text: bytes, now: float) -> None:
        message = SchedulerMessage.FromString(text)
        self.session.receive(message)
        for rejected in message.rejected:
            assert rejected.reason == REJECT_REASON_QUEUE_FULL, rejected.message
            self.cluster.refused(self.submitted.pop(rejected.group), now)
        self.cluster.told(self.number, message)
        outputs = message.outputs
        for group, first_token in zip(outputs.groups, outputs.first_tokens, strict=True):
            if not first_token:
                self.submitted[group].first_token_at = now
        for finish in outputs.finishes:
            request = self.submitted.pop(finish.group)
            request.num_cached_tokens = finish.num_cached_tokens
            self.cluster.ended(request, now)

    # --- The scheduler's side

    def _receive(self, message: RouterMessage, now: float) -> None:
        for command in self.intake.receive(message, now):
            assert isinstance(command, SubmitGroup), f"nothing is cancelled or refused here: {command}"
            self.requests.handle(command, now)
        self._advance(now)

    def _finish_step(self, result: Result, now: float) -> None:
        self.requests.collect(self.core.apply(result, now))
        self._advance(now)

    def _advance(self, now: float) -> None:
        """Does what the step loop does after each event: makes the plans that it may, and sends the router the news."""
        while (plan := self.core.schedule(now)) is not None:
            shape, result = self.rows.apply(plan)
            self.busy_until = max(now, self.busy_until) + self.step_time.seconds(shape)
            self.cluster.at(self.busy_until, partial(self._finish_step, result))
        for _, parcels in self.requests.take_messages(steps=StepTotals(), workers_ready=True, repeat_load=False):
            for parcel in parcels:
                self.cluster.at(now + _HOP_S, partial(self._hear, parcel.message))


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The results of a run; times in seconds."""

    requests: Sequence[Request]

    def __post_init__(self) -> None:
        assert not any(each.was_refused for each in self.requests), "a queue was full"

    @property
    def duration(self) -> float:
        return max(each.ended_at for each in self.requests) - min(each.at for each in self.requests)

    @property
    def output_tokens_per_second(self) -> float:
        return sum(each.num_output_tokens for each in self.requests) / self.duration

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were found in caches."""
        return sum(each.num_cached_tokens for each in self.requests) / sum(
            len(each.token_ids) for each in self.requests
        )

    @property
    def ttft_ms_mean(self) -> float:
        return 1000 * float(np.mean([each.ttft for each in self.requests]))

    def ttft_ms(self, percent: float) -> float:
        return 1000 * float(np.percentile([each.ttft for each in self.requests], percent))
