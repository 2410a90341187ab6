"""Schedulers without a model, for measuring routers: every sequence gets a token in each step.

    python -m benchmarks.router.fake_scheduler ADDRESS [ADDRESS...]

They speak the real Session. A line on stdin, {"streams": N, "rate": R}, makes them wait until they have N sequences
together, and then each make R steps a second until all sequences have been cancelled; the answer is an empty line. Like
a real scheduler, each sends all outputs of a step in one message, and those of several steps in one if the router lags.
Sessions that call themselves MIRROR get the same messages.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence

import grpc
import grpc.aio

from configs.features import ITEMS
from protos import inference_pb2 as pb
from protos import scheduler_pb2 as wire
from runtime.media.recipes.qwen2_vl import PixelBounds, Qwen2VLRecipe
from runtime.media.recipes.registry import recipe_to_json
from runtime.wire import PROTOCOL_VERSION, SESSION_MESSAGE_BYTES

MAX_TOKENS = 900_000
SERVICE, METHOD, MIRROR = "octavo.v1.Scheduler", "Session", "mirror"
MODEL_NAME, MAX_MODEL_LEN, VOCAB_SIZE = "no-model", 1_000_000, 49_152
# Ids below are SmolLM2's special tokens.
_FIRST_ORDINARY = 20
_EOS = 2
# Images become up to 64 tokens.
IMAGE_TOKEN, VIDEO_TOKEN = 6, 7
_BOUNDS = PixelBounds(56 * 56, 28 * 28 * 64)
_RECIPE = Qwen2VLRecipe(
    image_token=IMAGE_TOKEN, video_token=VIDEO_TOKEN, patch_size=14, temporal_patch_size=2, merge_size=2,
    image=_BOUNDS, video=_BOUNDS, tokens_per_second=2.0,
)  # fmt: skip
# Upper bound of the bytes that one entry of the columns takes.
_ENTRY_BYTES = 24
_LOAD_INTERVAL_S = 0.5


class _Session:
    """The Session of one router, and how many steps it has been sent."""

    def __init__(self, *, is_mirror: bool) -> None:
        self.is_mirror = is_mirror
        self.num_sent = 0
        self.last_group = 0
        # Requests with items, which it refuses once they have come.
        self.rejected: list[wire.Rejected] = []
        self.wake = asyncio.Event()


class _Scheduler:
    def __init__(self, replica_id: str, changed: asyncio.Condition) -> None:
        """changed: notified whenever num_running may have changed."""
        self._replica_id, self._changed = replica_id, changed
        self._sessions: set[_Session] = set()
        # Running groups; a dict, for its order.
        self._groups: dict[int, None] = {}
        self._num_made = 0
        chosen = random.Random(0)
        self._tokens = [chosen.randrange(_FIRST_ORDINARY, VOCAB_SIZE) for _ in range(30_011)]

    async def serve(self, requests: AsyncIterator[wire.RouterMessage], context: grpc.aio.ServicerContext):
        opening = await anext(aiter(requests))
        session = _Session(is_mirror=opening.open.router_id == MIRROR)
        reader = asyncio.create_task(self._read(session, requests))
        self._sessions.add(session)
        model = pb.ModelInfo(
            name=MODEL_NAME,
            fingerprint="one",
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            block_size=16,
            # Without one there are no constraints.
            eos_token_ids=[_EOS],
            media_json=recipe_to_json(_RECIPE),
        )
        welcome = wire.Welcome(
            protocol_version=PROTOCOL_VERSION, replica_id=self._replica_id, epoch=1, model=model, features=[ITEMS]
        )
        try:
            yield wire.SchedulerMessage(welcome=welcome, load=self._load(session))
            while True:
                try:
                    async with asyncio.timeout(_LOAD_INTERVAL_S):
                        await session.wake.wait()
                except TimeoutError:
                    yield wire.SchedulerMessage(load=self._load(session))
                    continue
                session.wake.clear()
                if session.rejected:
                    yield wire.SchedulerMessage(rejected=session.rejected, load=self._load(session))
                    session.rejected = []
                while self._groups and session.num_sent < self._num_made:
                    yield wire.SchedulerMessage(outputs=self._outputs(session), load=self._load(session))
        finally:
            self._sessions.discard(session)
            reader.cancel()

    @property
    def num_running(self) -> int:
        return len(self._groups)

    def begin(self) -> None:
        """Restarts the count of steps at 0."""
        for session in self._sessions:
            session.num_sent = 0
        self._num_made = 0

    def step(self) -> None:
        self._num_made += 1
        for session in self._sessions:
            session.wake.set()

    async def _read(self, session: _Session, requests: AsyncIterator[wire.RouterMessage]) -> None:
        async for message in requests:
            if message.HasField("submit") and message.submit.items:
                session.last_group = message.submit.group
                reason = wire.REJECT_REASON_INVALID
                session.rejected.append(wire.Rejected(group=message.submit.group, reason=reason, message="no model"))
                session.wake.set()
            elif message.HasField("submit"):
                session.last_group = message.submit.group
                self._groups[message.submit.group] = None
            elif message.HasField("cancel"):
                self._groups.pop(message.cancel.group, None)
            async with self._changed:
                self._changed.notify_all()

    def _load(self, session: _Session) -> wire.Load:
        return wire.Load(num_running=len(self._groups), workers_ready=True, last_group=session.last_group)

    def _outputs(self, session: _Session) -> wire.StepOutputs:
        """The outputs of steps that were not sent yet, as many as a message holds."""
        groups, outputs = list(self._groups), wire.StepOutputs()
        most = max(SESSION_MESSAGE_BYTES // (_ENTRY_BYTES * len(groups)), 1)
        first = session.num_sent
        end = min(self._num_made, first + most)
        for step in range(first, end):
            outputs.groups.extend(groups)
            outputs.choices.extend([0] * len(groups))
            outputs.first_tokens.extend([step] * len(groups))
            outputs.num_tokens.extend([1] * len(groups))
            start = step % (len(self._tokens) - len(groups))
            outputs.token_ids.extend(self._tokens[start : start + len(groups)])
        session.num_sent = end
        return outputs


async def _run(schedulers: Sequence[_Scheduler], changed: asyncio.Condition, num_streams: int, rate: float) -> None:
    """Steps all schedulers at the same times, until no stream is left."""
    async with changed:
        await changed.wait_for(lambda: sum(each.num_running for each in schedulers) == num_streams)
    for each in schedulers:
        each.begin()
    first, num_made = time.monotonic(), 0
    while any(each.num_running for each in schedulers):
        await asyncio.sleep(first + num_made / rate - time.monotonic())
        num_made += 1
        for each in schedulers:
            each.step()


async def _start(address: str, scheduler: _Scheduler) -> grpc.aio.Server:
    server = grpc.aio.server(options=[("grpc.max_send_message_length", -1), ("grpc.so_reuseport", 0)])
    handler = grpc.stream_stream_rpc_method_handler(
        scheduler.serve,
        request_deserializer=wire.RouterMessage.FromString,
        response_serializer=wire.SchedulerMessage.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
    server.add_insecure_port(address)
    await server.start()
    return server


async def _main(addresses: Sequence[str]) -> None:
    changed = asyncio.Condition()
    schedulers = [_Scheduler(str(number), changed) for number in range(len(addresses))]
    servers = [await _start(*each) for each in zip(addresses, schedulers, strict=True)]
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    print(flush=True)
    while line := await commands.readline():
        command = json.loads(line)
        await _run(schedulers, changed, command["streams"], command["rate"])
        print(flush=True)
    for server in servers:
        await server.stop(None)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1:]))
