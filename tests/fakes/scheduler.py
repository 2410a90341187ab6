"""A scheduler without workers, for tests: it speaks the real Session over real gRPC and computes nothing.

Its next token, a NextToken, is a pure function of (token ids so far, number of prompt tokens among them, seed, choice),
so that a sequence continues on another fake exactly as it would have here.
Longer than 400 lines because it speaks the whole Session.
"""

import asyncio
import contextlib
import zlib
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio

from protos import inference_pb2 as pb
from protos import scheduler_pb2 as wire
from protos.scheduler_pb2_grpc import SchedulerServicer, add_SchedulerServicer_to_server
from runtime.media.names import item_name
from runtime.security.tls import add_port
from runtime.wire import PROTOCOL_VERSION, RESUBMISSION_BITS
from scheduler.sessions.rate_counts import RateCounts

NextToken = Callable[[Sequence[int], int, int, int], int]

VOCAB_SIZE = 49_152
EOS = 2


def hashed_token(token_ids: Sequence[int], num_prompt_tokens: int, seed: int, choice: int) -> int:
    """An ordinary token of SmolLM2's vocabulary. Hashes only the last 16 tokens, so that long outputs stay cheap."""
    state = zlib.crc32(repr((list(token_ids[-16:]), len(token_ids), seed, choice)).encode())
    return 20 + state % (VOCAB_SIZE - 20)


def scripted(output: Sequence[int]) -> NextToken:
    """A function that gives `output`, then EOS."""

    def next_token(token_ids: Sequence[int], num_prompt_tokens: int, seed: int, choice: int) -> int:
        position = len(token_ids) - num_prompt_tokens
        return output[position] if position < len(output) else EOS

    return next_token


def model_info(**changes: object) -> pb.ModelInfo:
    fields: dict = {
        "name": "test-model",
        "fingerprint": "one",
        "max_model_len": 2048,
        "vocab_size": VOCAB_SIZE,
        "eos_token_ids": [EOS],
        "dtype": "float32",
        "block_size": 16,
        "num_blocks": 1000,
        **changes,
    }
    return pb.ModelInfo(**fields)


@dataclass(slots=True)
class _Sequence:
    group: int
    choice: int
    token_ids: list[int]
    submit: wire.Submit
    num_prompt_tokens: int
    deadline: float | None

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass
class FakeScheduler:
    """One replica. Tests may read its counts and logs.

    address: a gRPC address to bind to. step_seconds: between two steps; 0 only yields to the loop. capacity: groups
    that may be live; more are rejected QUEUE_FULL. pause_at: sequences stop at this many output tokens.
    tokens_per_step: of one sequence, as with accepted drafts. is_broken: sequences end with an error. likely: logprobs.
    """

    address: str
    model: pb.ModelInfo = field(default_factory=model_info)
    next_token: NextToken = hashed_token
    step_seconds: float = 0.0
    capacity: int | None = None
    pause_at: int | None = None
    tokens_per_step: int = 1
    is_broken: bool = False
    likely: Callable[[Sequence[int]], list[tuple[int, float]]] | None = None
    # As if the queue were full for it and numbers above; if there is a capacity, only while it is used up.
    refused_priority: int | None = None
    # Tenants whose share of the queue is used up, with the priority from which on they are refused.
    refused_tenants: dict[str, int] = field(default_factory=dict)
    workers_ready: bool = True
    draining: bool = False
    features: Collection[str] = ()  # in its Welcome
    max_logprobs: int = 0
    first_token_shift: int = 0
    # Told at the end of each choice: draft tokens, and those of them that were accepted.
    drafts: tuple[int, int] = (0, 0)
    # None: no TLS.
    credentials: grpc.ServerCredentials | None = None
    silent: bool = False  # sends no Load by itself, as if it hung
    # The number of steps so far, and sums over them, as in Load.
    last_step: int = 0
    total_step_seconds: float = 0.0
    num_step_tokens: int = 0
    num_step_context_tokens: int = 0
    cancelled: list[wire.CancelSequences] = field(default_factory=list)
    submitted: list[wire.Submit] = field(default_factory=list)
    # Prompts, assembled from their parts, by group.
    prompts: dict[int, list[int]] = field(default_factory=dict)
    # Items, serialized, by name; those that arrived, in order, once more for each time.
    items: dict[bytes, bytes] = field(default_factory=dict)
    arrived_items: list[bytes] = field(default_factory=list)
    rate_counts: RateCounts = field(default_factory=RateCounts)
    # Times that a router has asked which others there are.
    num_asked: int = 0

    async def start(self) -> None:
        self._sessions: set[_FakeSession] = set()
        self.changed = asyncio.Condition()
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        add_SchedulerServicer_to_server(_Servicer(self), self._server)
        add_port(self._server, self.address, self.credentials)
        await self._server.start()

    async def kill(self) -> None:
        """Looks like kill -9 from outside: the Session breaks."""
        await self._server.stop(None)

    @property
    def num_live(self) -> int:
        return sum(len(session.sequences) for session in self._sessions)

    @property
    def routers(self) -> dict[str, int]:
        """The number of sequences of each connected router, by router_id."""
        return {session.router_id: len(session.sequences) for session in self._sessions}

    async def wait_until(self, condition: Callable[["FakeScheduler"], bool]) -> None:
        """Waits until `condition(self)` holds; checks it after each step and message."""
        async with asyncio.timeout(60), self.changed:
            await self.changed.wait_for(lambda: condition(self))

    def send_load(self, other_than: "_FakeSession | None" = None) -> None:
        """Sends the changed flags to all routers now."""
        for session in self._sessions - {other_than}:
            session.outgoing.put_nowait(wire.SchedulerMessage(load=session.load()))

    def give_up_all(self) -> None:
        """Ends all sequences, though no router asked for it."""
        for session in self._sessions:
            session.give_up_all()

    async def resume_steps(self) -> None:
        self.pause_at = None
        async with self.changed:
            self.changed.notify_all()


class _Servicer(SchedulerServicer):
    def __init__(self, scheduler: FakeScheduler) -> None:
        self._scheduler = scheduler

    async def Session(
        self, request_iterator: AsyncIterator[wire.RouterMessage], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[wire.SchedulerMessage]:
        opened = await anext(aiter(request_iterator))
        session = _FakeSession(self._scheduler, opened.open.router_id)
        session.peer_address = opened.open.peer_address
        if opened.open.protocol_version != PROTOCOL_VERSION:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"speak protocol_version {PROTOCOL_VERSION}")
        work = (session.read(request_iterator), session.step_forever(), session.send_loads())
        tasks = [asyncio.create_task(each) for each in work]
        self._scheduler._sessions.add(session)
        if not self._scheduler.silent:
            self._scheduler.send_load(other_than=session)
        async with self._scheduler.changed:
            self._scheduler.changed.notify_all()
        try:
            fake = self._scheduler
            welcome = wire.Welcome(protocol_version=PROTOCOL_VERSION, replica_id="fake", epoch=1, model=fake.model)
            welcome.MergeFrom(wire.Welcome(features=fake.features, max_logprobs=fake.max_logprobs))
            yield wire.SchedulerMessage(welcome=welcome, load=session.load())
            while True:
                yield await session.outgoing.get()
        finally:
            self._scheduler._sessions.discard(session)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def Routers(self, request: wire.RoutersRequest, context: grpc.aio.ServicerContext) -> wire.RoutersResponse:
        self._scheduler.num_asked += 1
        addresses = [session.peer_address for session in self._scheduler._sessions]
        return wire.RoutersResponse(peer_addresses=sorted({*addresses} - {""}), num_without_address=addresses.count(""))

    async def Count(self, request: wire.CountRequest, context: grpc.aio.ServicerContext) -> wire.CountResponse:
        return self._scheduler.rate_counts.count(request)

    async def Cancel(self, request: pb.CancelRequest, context: grpc.aio.ServicerContext) -> pb.CancelResponse:
        found = [each.end_request(request.request_id) for each in self._scheduler._sessions]
        attempts = [attempt >> RESUBMISSION_BITS for attempts in found for attempt in attempts]
        return pb.CancelResponse(cancelled=bool(attempts), attempt=max(attempts, default=0))


class _FakeSession:
    def __init__(self, scheduler: FakeScheduler, router_id: str) -> None:
        self.scheduler = scheduler
        self.router_id = router_id
        self.peer_address = ""
        self.sequences: dict[tuple[int, int], _Sequence] = {}
        self.outgoing: asyncio.Queue[wire.SchedulerMessage] = asyncio.Queue()
        self._incomplete: dict[int, tuple[wire.Submit, list[int]]] = {}
        self._item_parts: dict[bytes, bytearray] = {}
        self._last_group = 0

    @property
    def _has_room(self) -> bool:
        """True if there is a capacity and fewer groups are live."""
        scheduler = self.scheduler
        live_groups = {group for session in scheduler._sessions for group, _ in session.sequences}
        return scheduler.capacity is not None and len(live_groups) < scheduler.capacity

    def load(self) -> wire.Load:
        scheduler = self.scheduler
        return wire.Load(
            num_running=scheduler.num_live,
            num_free_blocks=900,
            num_blocks=1000,
            workers_ready=scheduler.workers_ready,
            draining=scheduler.draining,
            last_group=self._last_group,
            last_step=scheduler.last_step,
            step_seconds=scheduler.total_step_seconds,
            step_tokens=scheduler.num_step_tokens,
            step_context_tokens=scheduler.num_step_context_tokens,
            refused_priority=None if self._has_room else scheduler.refused_priority,
            refused_tenants=scheduler.refused_tenants,
            num_routers=len(scheduler._sessions),
        )

    async def read(self, messages: AsyncIterator[wire.RouterMessage]) -> None:
        async for message in messages:
            kind = message.WhichOneof("message")
            if kind == "submit":
                self._on_submit(message.submit)
            elif kind == "prompt_part":
                submit, prompt = self._incomplete[message.prompt_part.group]
                prompt.extend(message.prompt_part.prompt_token_ids)
                self._admit_if_whole(submit, prompt)
            elif kind == "item_part":
                self._on_item_part(message.item_part)
            elif kind == "cancel":
                self._on_cancel(message.cancel)
            async with self.scheduler.changed:
                self.scheduler.changed.notify_all()

    def _on_submit(self, submit: wire.Submit) -> None:
        scheduler = self.scheduler
        scheduler.submitted.append(submit)
        assert submit.group == self._last_group + 1, "groups grow by one"
        self._last_group = submit.group
        reason = None
        if scheduler.draining:
            reason = wire.REJECT_REASON_DRAINING
        elif scheduler.capacity is not None and not self._has_room:
            reason = wire.REJECT_REASON_QUEUE_FULL
        if reason is not None:
            rejected = wire.Rejected(group=submit.group, reason=reason, message=wire.RejectReason.Name(reason))
            self.outgoing.put_nowait(wire.SchedulerMessage(rejected=[rejected], load=self.load()))
            return
        prompt = list(submit.prompt_token_ids)
        self._incomplete[submit.group] = submit, prompt
        self._admit_if_whole(submit, prompt)

    def _on_item_part(self, part: wire.ItemPart) -> None:
        data = self._item_parts.setdefault(part.name, bytearray())
        data += part.data
        if len(data) < part.num_bytes:
            return
        scheduler = self.scheduler
        scheduler.items[part.name] = bytes(self._item_parts.pop(part.name))
        assert item_name(scheduler.items[part.name]) == part.name
        scheduler.arrived_items.append(part.name)
        for submit, prompt in list(self._incomplete.values()):
            self._admit_if_whole(submit, prompt)

    def _admit_if_whole(self, submit: wire.Submit, prompt: list[int]) -> None:
        if len(prompt) < submit.num_prompt_tokens:
            return
        missing = [span.name for span in submit.items if span.name not in self.scheduler.items]
        if missing:
            self.outgoing.put_nowait(wire.SchedulerMessage(wanted_items=missing))
            return
        del self._incomplete[submit.group]
        self.scheduler.prompts[submit.group] = prompt
        deadline = asyncio.get_running_loop().time() + submit.timeout if submit.timeout else None
        for start in submit.choices:
            token_ids = [*prompt, *start.output_token_ids]
            sequence = _Sequence(submit.group, start.choice, token_ids, submit, len(prompt), deadline)
            self.sequences[submit.group, start.choice] = sequence
        if submit.sampling.HasField("prompt_logprobs"):
            logprobs = [_logprobs(token_id) for token_id in prompt[1:]]
            for i in range(0, len(logprobs), 3):
                frame = pb.PromptLogprobs(first_position=1 + i, logprobs=logprobs[i : i + 3])
                sent = wire.SequencePromptLogprobs(group=submit.group, choice=submit.choices[0].choice, frame=frame)
                self.outgoing.put_nowait(wire.SchedulerMessage(prompt_logprobs=[sent]))

    def _on_cancel(self, cancel: wire.CancelSequences) -> None:
        self.scheduler.cancelled.append(cancel)
        choices = cancel.choices or [choice for group, choice in self.sequences if group == cancel.group]
        outputs = wire.StepOutputs()
        for choice in choices:
            if self.sequences.pop((cancel.group, choice), None) is not None:
                outputs.finishes.add(
                    group=cancel.group,
                    choice=choice,
                    reason=pb.FINISH_REASON_CANCELLED,
                    cancel_reason=cancel.reason,
                    num_cached_tokens=4,
                    num_draft_tokens=self.scheduler.drafts[0],
                    num_accepted_tokens=self.scheduler.drafts[1],
                )
        self.outgoing.put_nowait(wire.SchedulerMessage(outputs=outputs, load=self.load()))

    def end_request(self, request_id: str) -> list[int]:
        """Returns the attempts that were live."""
        keys = [key for key, sequence in self.sequences.items() if sequence.submit.request_id == request_id]
        outputs = wire.StepOutputs()
        attempts = [self.sequences[key].submit.attempt for key in keys]
        for group, choice in keys:
            del self.sequences[group, choice]
            outputs.finishes.add(
                group=group,
                choice=choice,
                reason=pb.FINISH_REASON_CANCELLED,
                cancel_reason=wire.CANCEL_REASON_REQUESTED,
            )
        self.outgoing.put_nowait(wire.SchedulerMessage(outputs=outputs, load=self.load()))
        return attempts

    def give_up_all(self) -> None:
        outputs = wire.StepOutputs()
        for group, choice in self.sequences:
            outputs.finishes.add(group=group, choice=choice, reason=pb.FINISH_REASON_CANCELLED, message="draining")
        self.sequences.clear()
        self.outgoing.put_nowait(wire.SchedulerMessage(outputs=outputs, load=self.load()))

    async def send_loads(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            if not self.scheduler.silent:
                self.outgoing.put_nowait(wire.SchedulerMessage(load=self.load()))

    async def step_forever(self) -> None:
        while True:
            outputs = self._step()
            if outputs.groups or outputs.finishes:
                self._count_step(outputs)
                self.outgoing.put_nowait(wire.SchedulerMessage(outputs=outputs, load=self.load()))
                async with self.scheduler.changed:
                    self.scheduler.changed.notify_all()
                await asyncio.sleep(self.scheduler.step_seconds)
            else:
                # Nothing can run until a message or a test changes something; deadlines must be checked regularly.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.02), self.scheduler.changed:
                        await self.scheduler.changed.wait()

    def _count_step(self, outputs: wire.StepOutputs) -> None:
        scheduler = self.scheduler
        scheduler.last_step += 1
        scheduler.total_step_seconds += scheduler.step_seconds
        scheduler.num_step_tokens += len(outputs.token_ids)
        scheduler.num_step_context_tokens += sum(len(each.token_ids) for each in self.sequences.values())

    def _step(self) -> wire.StepOutputs:
        scheduler, outputs = self.scheduler, wire.StepOutputs()
        now = asyncio.get_running_loop().time()
        for key, sequence in list(self.sequences.items()):
            if sequence.deadline is not None and now >= sequence.deadline:
                del self.sequences[key]
                outputs.finishes.add(
                    group=sequence.group,
                    choice=sequence.choice,
                    reason=pb.FINISH_REASON_CANCELLED,
                    cancel_reason=wire.CANCEL_REASON_DEADLINE,
                )
                continue
            if not scheduler.workers_ready:
                continue
            if scheduler.is_broken:
                del self.sequences[key]
                outputs.finishes.add(
                    group=sequence.group, choice=sequence.choice, reason=pb.FINISH_REASON_ERROR, message="broken"
                )
                continue
            if scheduler.pause_at is not None and sequence.num_output_tokens >= scheduler.pause_at:
                continue
            self._advance(sequence, outputs)
        return outputs

    def _advance(self, sequence: _Sequence, outputs: wire.StepOutputs) -> None:
        sampling = sequence.submit.sampling
        outputs.groups.append(sequence.group)
        outputs.choices.append(sequence.choice)
        outputs.first_tokens.append(sequence.num_output_tokens + self.scheduler.first_token_shift)
        first, likely = len(outputs.token_ids), self.scheduler.likely
        for _ in range(self.scheduler.tokens_per_step):
            token_id = self.scheduler.next_token(
                sequence.token_ids, sequence.num_prompt_tokens, sampling.seed, sequence.choice
            )
            if sampling.HasField("logprobs"):
                top = likely(sequence.token_ids)[: sampling.logprobs] if likely else ()
                outputs.logprobs.append(_logprobs(token_id, top))
            sequence.token_ids.append(token_id)
            outputs.token_ids.append(token_id)
            if self._end(sequence, token_id, outputs):
                break
        outputs.num_tokens.append(len(outputs.token_ids) - first)

    def _end(self, sequence: _Sequence, token_id: int, outputs: wire.StepOutputs) -> bool:
        sampling = sequence.submit.sampling
        own_stop = token_id in sampling.stop_token_ids
        is_eos = token_id in self.scheduler.model.eos_token_ids and not sampling.ignore_eos
        may_stop = sequence.num_output_tokens >= sampling.min_tokens
        if may_stop and (own_stop or is_eos):
            reason = pb.FINISH_REASON_STOP
        elif sequence.num_output_tokens >= sampling.max_tokens:
            reason, own_stop = pb.FINISH_REASON_LENGTH, False
        else:
            return False
        finish = outputs.finishes.add(group=sequence.group, choice=sequence.choice, reason=reason, num_cached_tokens=4)
        finish.num_draft_tokens, finish.num_accepted_tokens = self.scheduler.drafts
        if own_stop:
            finish.stop_token_id = token_id
        del self.sequences[sequence.group, sequence.choice]
        return True


def _logprobs(token_id: int, likely: Sequence[tuple[int, float]] = ()) -> pb.TokenLogprobs:
    chosen = pb.TokenLogprob(token_id=token_id, logprob=-0.5, rank=1)
    return pb.TokenLogprobs(chosen=chosen, top=[pb.TokenLogprob(token_id=i, logprob=x) for i, x in likely] or [chosen])
