"""The step wire: what ranks send to a scheduler, and what a scheduler sends to a rank."""

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random

import numpy as np
import zmq
from google.protobuf.message import DecodeError

from benchmarks.fuzz.edge import Edge
from benchmarks.fuzz.mutation import malformed
from configs.options import Options
from protos import inference_pb2
from protos import step_pb2 as pb
from protos.inference_pb2 import SamplingParams, TokenIds
from runtime.awake_time import AwakeTime
from runtime.wire import PROTOCOL_VERSION, heartbeat_endpoint, octavo_version, plan_digest
from scheduler.core.core import Core
from scheduler.core.messages import ChoiceStart, GroupRequest, StopRules
from scheduler.ranks.heartbeats import Heartbeats
from scheduler.ranks.membership import Terms
from scheduler.ranks.step_wire import GroupSampling, ResultError, StepCodec
from scheduler.ranks.workers import Workers
from scheduler.settings import core_settings
from scheduler.sockets import InvalidMessages
from tests.fakes.fake_runner import fake_runner
from tests.fakes.hash_runner import HashModel, HashRunner
from worker.errors import PlanError
from worker.process.loop import PlanChain

_NUM_SEQUENCES = 4
_IDENTITIES = (b"join-1", b"join-2", b"1:0", b"2:0", b"", b"\0", b"x" * 255, b"heartbeat-0-1")


class Results:
    """A scheduler's core with running sequences; each result comes while its plan is in flight."""

    def __init__(self) -> None:
        self._options = Options(block_size=8, max_num_seqs=8, max_num_batched_tokens=64)
        self._model = HashModel(max_model_len=64, num_blocks=60)
        self._core = Core(core_settings(self._options, self._model.info(self._options), 0))
        self._group = self._epoch = 0
        self._begin()

    def malformed(self, random: Random) -> bytes:
        chosen = inference_pb2.TokenLogprob(token_id=60, logprob=-0.5, rank=1)
        frame = inference_pb2.PromptLogprobs(first_position=1, logprobs=[inference_pb2.TokenLogprobs(chosen=chosen)])
        with_more = pb.StepResult()
        with_more.CopyFrom(self._result)
        with_more.num_tokens = np.ones(len(with_more.token_ids) // 4, "<i4").tobytes()
        with_more.prompt_logprobs.add(sequence=1, frame=frame)
        with_more.failed_sequences.append(1)
        with_more.drafts.add(sequence=1, token_ids=[5])
        return malformed((self._result, self._result, with_more), random)

    async def feed(self, message: bytes) -> str:
        now = time.monotonic()
        try:
            result = pb.StepResult.FromString(message)
        except DecodeError:
            return "no message"
        # Like the step loop, which drops results of any other step.
        result.step, result.epoch = self._result.step, self._epoch
        try:
            outcome = self._codec.decode(result)
        except ResultError:
            self._core.lose_workers(now)
            self._core.resize(self._model.num_blocks, now=now)
            self._begin()
            return "epoch ended"
        self._core.apply(outcome.result, now)
        self._core.check_integrity()
        # The scheduler's state no longer matches its worker's.
        self._core.lose_workers(now)
        self._core.resize(self._model.num_blocks, now=now)
        self._begin()
        return "taken"

    async def check(self) -> None:
        for _ in range(3):
            num_steps = self._core.stats.num_output_tokens
            self._core.apply(self._codec.decode(self._result).result, time.monotonic())
            assert self._core.stats.num_output_tokens > num_steps, "a good result brings no token"
            self._step()
        self._core.check_integrity()

    def _begin(self) -> None:
        self._epoch += 1
        self._core.take_ends()
        self._core.take_events()
        self._runner = HashRunner(self._model, self._options)
        self._codec = StepCodec(self._epoch)
        self._step()

    def _step(self) -> None:
        """Makes the next plan and computes its result."""
        now = time.monotonic()
        load = self._core.load
        for _ in range(_NUM_SEQUENCES - load.num_running - load.num_waiting):
            self._group += 1
            params = (
                SamplingParams(seed=1, logprobs=1) if self._group % 2 else SamplingParams(seed=1, prompt_logprobs=1)
            )
            request = GroupRequest(
                group=self._group,
                request_id=str(self._group),
                prompt_token_ids=(20, 21, self._group % 500 + 20),
                choices=(ChoiceStart(choice=0),),
                stop=StopRules(max_tokens=8, ignore_eos=True),
                sampling=GroupSampling(params, group=self._group, first_choice=0),
            )
            assert self._core.submit(request, now) is None
        plan = self._core.schedule(now)
        assert plan is not None
        frame = pb.SchedulerToWorker.FromString(self._codec.encode(plan))
        self._result = self._runner.execute(frame.plan)


@asynccontextmanager
async def results(directory: Path) -> AsyncIterator[Edge]:
    yield Results()


class Plans:
    """A rank's rows, batch and sampler, and a model without weights; they get plans as from the rank's loop."""

    def __init__(self) -> None:
        self._runner = fake_runner(num_swap_blocks=8)
        self._reset()

    def malformed(self, random: Random) -> bytes:
        step, digest = self._step + 1, self._chain_digest
        new = pb.NewRow(
            row=1,
            sequence=self._step + 10,
            token_ids=[5, 6, 7],
            num_prompt_tokens=3,
            block_ids=[9, 10],
            sampling=SamplingParams(
                temperature=0.7,
                top_k=5,
                top_p=0.9,
                min_p=0.1,
                seed=3,
                logprobs=2,
                prompt_logprobs=1,
                repetition_penalty=1.1,
                presence_penalty=0.5,
                frequency_penalty=0.5,
                logit_bias={3: 1.0},
                min_tokens=2,
                stop_token_ids=[4],
                allowed_token_ids=[5, 6],
                bad_word_token_ids=[TokenIds(ids=[7, 8])],
                logprob_token_ids=[5, 9],
            ),
        )
        decode = pb.StepPlan(epoch=1, step=step, previous_digest=digest, decode_rows=b"\0\0")
        admit = pb.StepPlan(epoch=1, step=step, previous_digest=digest, new_rows=[new], rows=[1], num_tokens=[3])
        drafts = pb.StepPlan(
            epoch=1,
            step=step,
            previous_digest=digest,
            rows_with_drafts=b"\0\0",
            num_drafts=b"\2\0\0\0",
            draft_token_ids=b"\5\0\0\0\6\0\0\0",
        )
        others = pb.StepPlan(
            epoch=1,
            step=step,
            previous_digest=digest,
            decode_rows=b"\0\0",
            grown_rows=[0],
            num_new_blocks=[1],
            new_blocks=[20],
            trimmed_rows=[0],
            num_kept_blocks=[2],
            swap_out_blocks=[30],
            swap_out_host_blocks=[1],
            swap_in_host_blocks=[2],
            swap_in_blocks=[31],
        )
        plan = malformed((decode, admit, drafts, others), random)
        # The frame around the plan is valid: field 2, and a length.
        return b"\x12" + _varint(len(plan)) + plan

    async def feed(self, message: bytes) -> str:
        try:
            received = pb.SchedulerToWorker.FromString(message)
        except DecodeError:
            return "no message"
        if not received.HasField("plan"):
            return "no plan"
        try:
            self._chain.follow(received.plan, message)
        except PlanError:
            return "out of the chain"
        try:
            self._runner.execute(received.plan).SerializeToString()
        except PlanError:
            self._reset()
            return "refused"
        except AssertionError as error:
            # Only the fake model checks what blocks hold; the reader of a plan cannot know it.
            if "does not hold the context" not in str(error):
                raise
        self._reset()
        return "computed"

    async def check(self) -> None:
        self._reset()
        result = self._runner.execute(pb.StepPlan(epoch=1, step=2, decode_rows=b"\0\0"))
        assert len(result.token_ids) == 4, "a good plan gives no token"
        self._reset()

    def _reset(self) -> None:
        """Begins a new epoch, with a sequence that decodes in row 0."""
        self._runner.reset()
        self._chain, self._step, self._chain_digest = PlanChain(), 1, b""
        first = pb.NewRow(
            row=0,
            sequence=1,
            token_ids=[5, 6, 7, 8],
            num_prompt_tokens=4,
            block_ids=[1, 2, 3],
            sampling=SamplingParams(seed=1),
        )
        plan = pb.StepPlan(epoch=1, step=1, new_rows=[first], rows=[0], num_tokens=[4])
        frame = pb.SchedulerToWorker(plan=plan).SerializeToString()
        self._chain.follow(plan, frame)
        self._chain_digest = plan_digest(frame)
        self._runner.execute(plan)


def _varint(number: int) -> bytes:
    parts = []
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes((*parts, number))


@asynccontextmanager
async def plans(directory: Path) -> AsyncIterator[Edge]:
    yield Plans()


class Ranks:
    """A scheduler's end of the wire, which gets frames from any peer that reaches its socket, known or not."""

    def __init__(self, directory: Path, context: zmq.Context, heartbeats: Heartbeats, invalid: InvalidMessages) -> None:
        self._options = Options(served_model_name="hashes", block_size=8, max_num_seqs=16, max_num_batched_tokens=64)
        self._context, self._endpoint = context, f"ipc://{directory}/step"
        self.workers = Workers(
            context,
            self._endpoint,
            None,
            Terms.of(self._options),
            heartbeats,
            invalid,
            AwakeTime(1.0),
            rendezvous=None,
            in_lockstep=False,
            heartbeat_timeout=10.0,
            step_timeout=60.0,
        )
        self._peers = [self._connect(identity) for identity in _IDENTITIES]
        self._beats = self._connect(b"beats", heartbeat_endpoint(self._endpoint))

    def _connect(self, identity: bytes, endpoint: str = "") -> zmq.Socket:
        peer: zmq.Socket = self._context.socket(zmq.DEALER)
        if identity and identity[0]:
            peer.setsockopt(zmq.IDENTITY, identity)
        peer.setsockopt(zmq.LINGER, 0)
        peer.connect(endpoint or self._endpoint)
        return peer

    def malformed(self, random: Random) -> bytes:
        model = HashModel().info(self._options)
        hello = pb.Hello(
            protocol_version=PROTOCOL_VERSION,
            octavo_version=octavo_version(),
            world_size=1,
            model="hashes",
            block_size=8,
            max_num_seqs=16,
            max_num_batched_tokens=64,
            instance=random.randrange(3),
            pid=1,
        )
        seeds = (
            pb.WorkerToScheduler(hello=hello),
            pb.WorkerToScheduler(ready=pb.Ready(epoch=self.workers.epoch, model=model)),
            pb.WorkerToScheduler(result=pb.StepResult(epoch=1, step=1, token_ids=b"\1\0\0\0")),
            pb.WorkerToScheduler(failure=pb.Failure(epoch=self.workers.epoch, message="no")),
            pb.Heartbeat(epoch=1, instance=3, state=pb.WORKER_STATE_IDLE, progress=0.5),
        )
        which = random.randrange(len(self._peers) + 2)
        return bytes([which, random.randrange(4)]) + malformed(seeds, random)

    async def feed(self, message: bytes) -> str:
        which, num_frames = (*message[:2], 0, 0)[:2]
        frames = [message[2:]] * (1 if num_frames else 3)
        if which >= len(self._peers):
            return self._beat(message[2:])
        peer = self._peers[which]
        try:
            peer.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            # The socket accepts only one peer of a name at a time.
            return "not taken"
        # Gives ZeroMQ's own thread a moment.
        self.workers.sockets[0].poll(1)
        ready = self.workers.sockets
        events = [*self.workers.receive(time.monotonic(), ready), *self.workers.tick(time.monotonic())]
        with suppress(zmq.Again):
            while True:
                pb.SchedulerToWorker.FromString(peer.recv_multipart(zmq.NOBLOCK)[0])
        return type(events[0]).__name__ if events else "nothing"

    def _beat(self, message: bytes) -> str:
        self._beats.send(message)
        if not self._beats.poll(0):
            return "heartbeat"
        pb.Heartbeat.FromString(self._beats.recv())
        return "heartbeat answered"

    async def check(self) -> None:
        while self._beats.poll(100):
            self._beats.recv()
        self._beats.send(pb.Heartbeat(rank=0, instance=7).SerializeToString())
        assert self._beats.poll(5000), "a good heartbeat is not answered"
        self._beats.recv()
        for peer in self._peers:
            peer.close(linger=0)
        self._peers = [self._connect(identity) for identity in _IDENTITIES]

    def close(self) -> None:
        for peer in (*self._peers, self._beats):
            peer.close(linger=0)
        self.workers.close("")


@asynccontextmanager
async def ranks(directory: Path) -> AsyncIterator[Edge]:
    logging.getLogger("octavo").setLevel(logging.CRITICAL)
    with zmq.Context() as context:
        invalid = InvalidMessages(lambda: None)
        heartbeats = Heartbeats(
            context, heartbeat_endpoint(f"ipc://{directory}/step"), None, instance=1, invalid=invalid, timeout=10
        )
        heartbeats.start_bound()
        edge = Ranks(directory, context, heartbeats, invalid)
        try:
            yield edge
        finally:
            edge.close()
            heartbeats.stop()
