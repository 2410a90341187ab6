"""Schedulers without a model, for measuring routers: every sequence gets a token in each step.

    python -m benchmarks.router.fake_scheduler ADDRESS [ADDRESS...]

They speak the real Session. A line on stdin, {"streams": N, "rate": R}, makes them wait until they have N sequences
together, and then each make R steps a second until all sequences have been cancelled; the answer is an empty line. Each
packs the outputs of a step, and joins the steps that wait for a router that lags, with the code of a real scheduler.
All Sessions get the same messages; the one that calls itself MIRROR submits nothing.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence

import grpc
import grpc.aio
import numpy as np

from configs.features import ITEMS
from protos import inference_pb2 as pb
from protos import scheduler_pb2 as wire
from runtime.media.recipes.qwen2_vl import PixelBounds, Qwen2VLRecipe
from runtime.media.recipes.registry import recipe_to_json
from runtime.wire import PROTOCOL_VERSION
from scheduler.sessions.outgoing import SESSION_BUFFER_BYTES, Outgoing
from scheduler.sessions.sessions import Outbox, OutputColumns

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
    image_token=IMAGE_TOKEN,
    video_token=VIDEO_TOKEN,
    patch_size=14,
    temporal_patch_size=2,
    merge_size=2,
    image=_BOUNDS,
    video=_BOUNDS,
    tokens_per_second=2.0,
)
_LOAD_INTERVAL_S = 0.5


class _Scheduler:
    def __init__(self, replica_id: str, changed: asyncio.Condition) -> None:
        """changed: notified whenever num_running may have changed."""
        self._replica_id, self._changed = replica_id, changed
        # One for each Session.
        self._outgoing: set[Outgoing] = set()
        # Running groups; a dict, for its order.
        self._groups: dict[int, None] = {}
        self._last_group = 0
        self._num_made = 0
        chosen = random.Random(0)
        self._tokens = np.array([chosen.randrange(_FIRST_ORDINARY, VOCAB_SIZE) for _ in range(30_011)], np.int32)

    async def serve(self, requests: AsyncIterator[wire.RouterMessage], context: grpc.aio.ServicerContext):
        await anext(aiter(requests))
        outgoing = Outgoing(SESSION_BUFFER_BYTES)
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
        outgoing.put(Outbox().take(self._load, welcome))
        tasks = [asyncio.create_task(self._read(outgoing, requests)), asyncio.create_task(self._repeat_load(outgoing))]
        self._outgoing.add(outgoing)
        try:
            while (message := await outgoing.get()) is not None:
                yield message
            print(f"a router has left more than {SESSION_BUFFER_BYTES} bytes unread: cut off", file=sys.stderr)
        finally:
            self._outgoing.discard(outgoing)
            for task in tasks:
                task.cancel()

    @property
    def num_running(self) -> int:
        return len(self._groups)

    def begin(self) -> None:
        """Restarts the count of steps at 0."""
        self._num_made = 0

    def step(self) -> None:
        """Makes a token for each sequence."""
        step, size = self._num_made, len(self._groups)
        self._num_made += 1
        if not size:
            return
        start = step % (len(self._tokens) - size)
        outbox = Outbox()
        outbox.add_columns(
            OutputColumns(
                groups=np.fromiter(self._groups, np.int64, size),
                choices=np.zeros(size, np.int32),
                first_tokens=np.full(size, step, np.int32),
                num_tokens=None,
                token_ids=self._tokens[start : start + size],
            )
        )
        parcels = outbox.take(self._load)
        for outgoing in self._outgoing:
            outgoing.put(parcels)

    async def _read(self, outgoing: Outgoing, requests: AsyncIterator[wire.RouterMessage]) -> None:
        async for message in requests:
            if message.HasField("submit"):
                self._last_group = message.submit.group
                if message.submit.items:
                    # Only what routers do with items is measured.
                    outbox = Outbox()
                    outbox.add_rejected(message.submit.group, wire.REJECT_REASON_INVALID, "no model")
                    outgoing.put(outbox.take(self._load))
                else:
                    self._groups[message.submit.group] = None
            elif message.HasField("cancel"):
                self._groups.pop(message.cancel.group, None)
            async with self._changed:
                self._changed.notify_all()

    async def _repeat_load(self, outgoing: Outgoing) -> None:
        while True:
            await asyncio.sleep(_LOAD_INTERVAL_S)
            outgoing.put(Outbox().take(self._load))

    @property
    def _load(self) -> wire.Load:
        return wire.Load(num_running=len(self._groups), workers_ready=True, last_group=self._last_group)


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
        # No serializer: messages come serialized, as in a real scheduler.
        scheduler.serve,
        request_deserializer=wire.RouterMessage.FromString,
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
