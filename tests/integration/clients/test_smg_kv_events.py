"""VllmEngine/SubscribeKvEvents: SMG follows the caches of all replicas as that of one engine."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

pytest.importorskip("smg_grpc_proto")

from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from configs.options import Options
from octavo.client.admin import Admin
from router.compat import kv_relay
from runtime.block_hashes import hash_prompt_blocks, scope_of
from scheduler.server import SchedulerServer
from scheduler.sessions.kv_events.publisher import outside_hash
from tests.fakes.hash_runner import HashModel
from tests.fakes.routers import running_router
from tests.support.scheduler.kv_events import cached, events_options, serve_prompts
from tests.support.scheduler.scheduling import RouterEnd, running_scheduler, running_worker

MODEL = HashModel(vocab_size=49_152)


def signed(name: int) -> int:
    return name - 2**64 if name >= 2**63 else name


@contextlib.asynccontextmanager
async def running(directory: Path, **router_options: Any) -> AsyncIterator[tuple[Options, list[SchedulerServer], int]]:
    """Two schedulers and a router; yields its port."""
    options = events_options(directory, served_model_name="test-model", data_parallel_size=2)
    async with contextlib.AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(running_scheduler(options, replica)) for replica in range(2)]
        for replica in range(2):
            await stack.enter_async_context(running_worker(options, model=MODEL, replica=replica))
        addresses = [options.scheduler_address(replica) for replica in range(2)]
        names = ("kv_events_endpoint", "kv_events_replay_endpoint", "kv_events_topic")
        published = {name: getattr(options, name) for name in names}
        server, _ = await stack.enter_async_context(
            running_router(addresses, compat="smg", runtime_dir=directory / "router", **published, **router_options)
        )
        await server.wait_ready()
        yield options, servers, server.port


class Subscriber:
    """Folds what it is told, as the published file says."""

    def __init__(self, engine: Any, start: int = 0, metadata: Any = None) -> None:
        self.blocks: dict[int, tuple[tuple[int, ...], int | None]] = {}
        self.last = start - 1
        self.num_chunks = self.num_changes = 0
        self._call = engine.SubscribeKvEvents(
            common.SubscribeKvEventsRequest(start_sequence_number=start), metadata=metadata
        )

    async def read_until(self, expected: set[int]) -> None:
        async with asyncio.timeout(20):
            while self.blocks.keys() != expected or not self.num_chunks + self.num_changes:
                self.take(await self._call.read())

    def take(self, batch: common.KvEventBatch) -> None:
        events = list(batch.events)
        if batch.HasField("snapshot"):
            assert batch.snapshot.index == self.num_chunks
            if not self.num_chunks:
                self.last = batch.sequence_number - 1
                assert events.pop(0).WhichOneof("data") == "cleared"
            self.num_chunks += 1
        else:
            self.num_changes += 1
        assert batch.sequence_number == self.last + 1
        self.last = batch.sequence_number
        for event in events:
            if event.HasField("removed"):
                for each in event.removed.block_hashes:
                    del self.blocks[each]
                continue
            stored = event.stored
            parent = stored.parent_block_hash if stored.HasField("parent_block_hash") else None
            for block in stored.blocks:
                assert block.block_size == len(block.token_ids) == 8
                assert block.block_hash not in self.blocks
                self.blocks[block.block_hash] = (tuple(block.token_ids), parent)
                parent = block.block_hash

    def end(self) -> None:
        self._call.cancel()


async def test_a_subscribers_picture_is_the_union_of_the_replicas_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_relay, "_CHUNK", 7)
    async with (
        running(tmp_path) as (options, servers, port),
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        engine: Any = VllmEngineStub(channel)  # type: ignore[arg-type]

        def union() -> set[int]:
            return {signed(name) for server in servers for name in cached(server)}

        async def serve(count: int, seed: int) -> None:
            await asyncio.gather(*(serve_prompts(options, count, replica=each, seed=seed + each) for each in range(2)))

        await serve(12, 0)
        early = Subscriber(engine)
        await early.read_until(union())
        assert early.num_chunks > 1
        assert not early.num_changes
        await serve(12, 5)
        await early.read_until(union())
        assert early.num_changes
        # One that was there before goes on; another one gets the state.
        again, late = Subscriber(engine, early.last + 1), Subscriber(engine)
        again.blocks = dict(early.blocks)
        with Admin(options.scheduler_address(0)) as admin:
            await asyncio.to_thread(admin.reset_prefix_cache)
        await serve(3, 9)
        for each in (early, again, late):
            await each.read_until(union())
        assert not again.num_chunks
        assert late.num_chunks
        for each in (early, again, late):
            each.end()


async def test_blocks_come_with_their_tokens_and_the_blocks_before_them(tmp_path: Path) -> None:
    async with (
        running(tmp_path) as (options, _, port),
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        subscriber = Subscriber(VllmEngineStub(channel))  # type: ignore[arg-type]
        names = [signed(outside_hash(each)) for each in hash_prompt_blocks(range(30, 54), 8, scope_of(""))]
        async with RouterEnd(options.scheduler_address(1)) as router:
            await router.finish(await router.submit(list(range(30, 55)), max_tokens=1))
        await subscriber.read_until(set(names))
        assert subscriber.blocks == {
            name: (tuple(range(30 + 8 * index, 38 + 8 * index)), names[index - 1] if index else None)
            for index, name in enumerate(names)
        }
        subscriber.end()


async def test_only_admins_read_what_others_ask(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.touch(mode=0o600)
    keys.write_text("keys:\n  - {name: t, key: a-long-enough-key}\n  - {name: u, key: another-long-key, admin: true}\n")
    async with (
        running(tmp_path, api_keys_file=str(keys)) as (_, _, port),
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        engine: Any = VllmEngineStub(channel)  # type: ignore[arg-type]
        tenant, admin = ((("authorization", f"Bearer {key}"),) for key in ("a-long-enough-key", "another-long-key"))
        with pytest.raises(grpc.aio.AioRpcError, match="admin: true") as error:
            await engine.SubscribeKvEvents(common.SubscribeKvEventsRequest(), metadata=tenant).read()
        assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED
        subscriber = Subscriber(engine, metadata=admin)
        await subscriber.read_until(set())
        subscriber.end()
