"""The Session: what routers send to a scheduler, and what a scheduler sends to a router."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import cast

from google.protobuf.message import DecodeError

from benchmarks.fuzz.edge import Edge
from benchmarks.fuzz.mutation import malformed
from configs.options import Options
from protos import inference_pb2, step_pb2
from protos import scheduler_pb2 as pb
from protos.inference_pb2 import SamplingParams
from router.accepted import Request
from router.errors import RequestError
from router.replicas.policies.prefix_index import PrefixIndex
from router.replicas.session import Session, SessionError
from router.security.identity import RateLimits
from router.streams.choices import new_choices
from router.streams.outbox import Outbox, WriteQueue
from router.streams.placement import Dispatcher, Placement
from router.streams.stream import Stream
from router.telemetry.metrics import RouterMetrics
from scheduler.core.core import Core
from scheduler.ranks.step_wire import StepCodec, StepTotals
from scheduler.sessions import commands
from scheduler.sessions.requests import Requests
from scheduler.sessions.submissions import Intake, ProtocolError
from scheduler.settings import core_settings
from tests.fakes.hash_runner import HashModel, HashRunner
from tests.fakes.routers import smollm2_tokenizer

_STEP_EVERY = 8
_CHECK_EVERY = 200
_READ_EVERY = 50
_A_MOMENT_S = 0.01
# Opens a new Session after so many messages, even if none was refused.
_SESSION_EVERY = 500


def _submit(group: int, **fields: object) -> pb.RouterMessage:
    sampling = SamplingParams(
        max_tokens=4, n=2, seed=3, logprobs=1, prompt_logprobs=1, stop_token_ids=[5], temperature=1
    )
    submit = pb.Submit(
        request_id=f"r{group}",
        group=group,
        num_prompt_tokens=3,
        prompt_token_ids=[20, 21, 22],
        sampling=sampling,
        choices=[pb.SequenceStart(choice=0), pb.SequenceStart(choice=1, output_token_ids=[30])],
        cache_salt="s",
        timeout=30.0,
    )
    submit.MergeFrom(pb.Submit(**fields))  # type: ignore[arg-type]
    return pb.RouterMessage(submit=submit)


class ToScheduler:
    """A scheduler's requests, core and wire, with a hash worker that checks the promises of its plans."""

    def __init__(self) -> None:
        self._options = Options(block_size=8, max_num_seqs=8, max_num_batched_tokens=64, max_queued_tokens=2000)
        self._runner = HashRunner(HashModel(max_model_len=64, num_blocks=40), self._options)
        self._info = self._runner.model_info
        self._core = Core(core_settings(self._options, self._info, 0))
        self._requests = Requests()
        self._requests.begin_epoch(self._core, pb.Welcome(epoch=1, model=self._info))
        self._codec = StepCodec(1)
        self._session = self._group = self._num_fed = 0
        self._open()

    def malformed(self, random: Random) -> bytes:
        self._group += 1
        part = pb.PromptPart(group=self._group - 1, prompt_token_ids=[23, 24])
        cancel = pb.CancelSequences(group=self._group - 1, choices=[0], reason=pb.CANCEL_REASON_CLIENT)
        seeds = (
            *(_submit(self._group) for _ in range(6)),
            _submit(self._group, num_prompt_tokens=5),
            pb.RouterMessage(prompt_part=part),
            pb.RouterMessage(cancel=cancel),
            pb.RouterMessage(open=pb.Open()),
        )
        return malformed(seeds, random)

    async def feed(self, message: bytes) -> str:
        self._num_fed += 1
        became = self._receive(message)
        if self._num_fed % _STEP_EVERY == 0:
            self._step()
        if self._num_fed % _CHECK_EVERY == 0:
            self._core.check_integrity()
        if self._num_fed % _SESSION_EVERY == 0:
            self._close()
            self._open()
        return became

    async def check(self) -> None:
        self._close()
        while self._core.has_work:
            self._step()
        self._core.check_integrity()
        load = self._core.load
        assert load.num_free_blocks == load.num_blocks, "blocks are left in use"
        self._open()
        for command in self._intake.receive(_submit(1), time.monotonic()):
            self._requests.handle(command, time.monotonic())  # type: ignore[arg-type]
        assert self._core.load.num_waiting, "a good request is refused"

    def _receive(self, data: bytes) -> str:
        now = time.monotonic()
        try:
            message = pb.RouterMessage.FromString(data)
            handled = self._intake.receive(message, now)
        except DecodeError:
            return "no message"
        except ProtocolError:
            self._close()
            self._open()
            return "Session ended"
        for command in handled:
            self._requests.handle(command, now)  # type: ignore[arg-type]
        return type(handled[0]).__name__ if handled else "nothing"

    def _step(self) -> None:
        now = time.monotonic()
        self._requests.expire(now)
        plan = self._core.schedule(now)
        if plan is not None:
            frame = step_pb2.SchedulerToWorker.FromString(self._codec.encode(plan))
            outcome = self._codec.decode(self._runner.execute(frame.plan))
            for key, prompt_logprobs in outcome.prompt_logprobs:
                self._requests.collect_prompt_logprobs(key, prompt_logprobs)
            self._requests.collect(self._core.apply(outcome.result, now))
        self._core.take_events()
        for _, parcels in self._requests.take_messages(steps=StepTotals(), workers_ready=True, repeat_load=True):
            for parcel in parcels:
                pb.SchedulerMessage.FromString(parcel.message)
        self._requests.take_ended()

    def _open(self) -> None:
        self._session += 1
        self._group = 0
        self._requests.handle(commands.OpenSession(session=self._session, watch_cache=self._session % 2 == 0), 0.0)
        self._intake = Intake(self._session, self._info, max_unsent_tokens=self._options.max_queued_tokens)

    def _close(self) -> None:
        self._requests.handle(commands.CloseSession(session=self._session), time.monotonic())


@asynccontextmanager
async def to_scheduler(directory: Path) -> AsyncIterator[Edge]:
    yield ToScheduler()


# --- The other way


class _Nowhere:
    """A dispatcher without replicas: a stream that loses its replica ends."""

    def open(self, stream: Stream) -> Placement:
        return Placement(stream, cast(Dispatcher, self))

    def move(self, placement: Placement, cause: str) -> None:
        placement.stream.fail(RequestError(cause))

    def retry(self, placement: Placement, rejected: pb.Rejected) -> None:
        placement.stream.fail(RequestError(rejected.message))

    def forget(self, placement: Placement) -> None:
        """Does nothing: no placement is kept."""


class ToRouter:
    """A router's Session with two streams and a prefix index."""

    def __init__(self) -> None:
        self._metrics, self._tokenizer = RouterMetrics(), smollm2_tokenizer()
        self._index = PrefixIndex()
        self._num_fed = 0
        self._open()

    def malformed(self, random: Random) -> bytes:
        model = inference_pb2.ModelInfo(name="m", max_model_len=64, vocab_size=49_152, block_size=16, num_blocks=100)
        chosen = inference_pb2.TokenLogprob(token_id=60, logprob=-0.5, rank=1)
        logprobs = [inference_pb2.TokenLogprobs(chosen=chosen, top=[chosen])] * 2
        outputs = pb.StepOutputs(
            groups=[1, 2],
            choices=[0, 0],
            first_tokens=[self._position, self._position],
            num_tokens=[1, 1],
            token_ids=[60, 61],
            logprobs=logprobs[:1],
        )
        ends = pb.StepOutputs(
            finishes=[pb.SequenceFinish(group=1, choice=1, reason=inference_pb2.FINISH_REASON_STOP, stop_token_id=5)]
        )
        frame = inference_pb2.PromptLogprobs(first_position=1, logprobs=logprobs)
        seeds = (
            pb.SchedulerMessage(outputs=outputs),
            pb.SchedulerMessage(outputs=outputs),
            pb.SchedulerMessage(outputs=ends),
            pb.SchedulerMessage(load=pb.Load(num_running=2, num_blocks=100, last_group=1, workers_ready=True)),
            pb.SchedulerMessage(welcome=pb.Welcome(epoch=2, model=model, protocol_version=1)),
            pb.SchedulerMessage(rejected=[pb.Rejected(group=2, reason=pb.REJECT_REASON_INVALID, message="no")]),
            pb.SchedulerMessage(prompt_logprobs=[pb.SequencePromptLogprobs(group=1, choice=0, frame=frame)]),
            pb.SchedulerMessage(
                cache_events=[
                    pb.CacheEvent(stored=bytes(32)),
                    pb.CacheEvent(removed=bytes(32)),
                    pb.CacheEvent(cleared=pb.CacheCleared()),
                ]
            ),
        )
        return malformed(seeds, random)

    async def feed(self, message: bytes) -> str:
        self._num_fed += 1
        try:
            received = pb.SchedulerMessage.FromString(message)
        except DecodeError:
            return "no message"
        try:
            self._receive(received)
        except SessionError:
            self._open()
            return "Session ended"
        if any(stream.done for stream in self._streams) or self._num_fed % _SESSION_EVERY == 0:
            became = "a stream ended"
            self._open()
        else:
            became = "taken"
        if self._num_fed % _READ_EVERY == 0:
            await self._read()
        return became

    async def check(self) -> None:
        self._open()
        stream = self._streams[0]
        for position in range(3):
            outputs = pb.StepOutputs(
                groups=[1],
                choices=[0],
                first_tokens=[position],
                num_tokens=[1],
                token_ids=[60],
                logprobs=[inference_pb2.TokenLogprobs()],
            )
            self._receive(pb.SchedulerMessage(outputs=outputs))
        assert stream.num_output_tokens == 3, "a good message is not taken"
        self._open()

    async def _read(self) -> None:
        """Checks that events for clients can be serialized."""
        for stream in self._streams:
            with contextlib.suppress(TimeoutError, RequestError):
                async with asyncio.timeout(_A_MOMENT_S):
                    for event in await stream.outbox.take():
                        event.SerializeToString()

    @property
    def _position(self) -> int:
        return self._streams[1].num_output_tokens

    def _receive(self, message: pb.SchedulerMessage) -> None:
        """Does what router.replicas.replica does."""
        self._session.receive(message)
        self._index.resize(0, self._session.welcome.model.num_blocks)
        try:
            self._index.apply(0, message.cache_events)
        except ValueError as error:
            # `apply` documents this error.
            raise SessionError(str(error)) from error

    def _open(self) -> None:
        for stream in getattr(self, "_streams", ()):
            stream.close()
        model = inference_pb2.ModelInfo(name="m", block_size=16, num_blocks=100, vocab_size=49_152, max_model_len=64)
        self._session = Session(pb.Welcome(epoch=1, model=model))
        self._index.add(0, block_size=16, max_blocks=100)
        self._streams = [self._stream("a", n=2, logprobs=1), self._stream("b", n=1)]

    def _stream(self, name: str, **sampling: int) -> Stream:
        params = SamplingParams(max_tokens=50, seed=1, temperature=1, prompt_logprobs=1, **sampling)  # type: ignore[arg-type]
        request = Request(
            request_id=name,
            scoped_id=name,
            model="m",
            prompt_token_ids=[5, 6, 7],
            sampling=params,
            arrival=time.monotonic(),
            eos_token_ids=[2],
        )
        outbox = Outbox(2**20, WriteQueue())
        choices = new_choices(params, request.eos_token_ids, self._tokenizer)
        stream = Stream(request, choices, [], cast(Dispatcher, _Nowhere()), self._metrics, outbox, RateLimits())
        stream.begin("", exact=True)
        stream.placement.submit_to(self._session)
        return stream


@asynccontextmanager
async def to_router(directory: Path) -> AsyncIterator[Edge]:
    yield ToRouter()
    await asyncio.sleep(0)
