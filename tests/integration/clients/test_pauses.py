"""vllm.Control pauses the schedulers themselves: for every router, in vLLM's three modes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from configs.options import Options
from protos import inference_pb2 as pb
from protos import scheduler_pb2 as wire
from protos.scheduler_pb2_grpc import SchedulerStub
from router.compat.protos import vllm_pb2 as vllm
from router.compat.protos.vllm_pb2_grpc import ControlStub
from tests.fakes.hash_runner import HashModel
from tests.fakes.routers import Received, receive, running_router
from tests.support.scheduler.scheduling import Gate, RouterEnd, make_options, running_scheduler, running_worker

# The router uses SmolLM2's tokenizer.
MODEL = HashModel(vocab_size=49_152)
REQUEST = pb.GenerateRequest(
    prompt="Once upon a time", sampling=pb.SamplingParams(max_tokens=40, seed=5, ignore_eos=True)
)


class Cluster:
    """Two routers over two schedulers. gates: one for each scheduler's worker, open at first."""

    def __init__(self, options: Options, gates: list[Gate]) -> None:
        self.options, self.gates = options, gates
        self.stubs: list[Any] = []
        self.controls: list[Any] = []

    async def pause(self, mode: vllm.PauseMode, router: int = 0) -> None:
        await self.controls[router].PauseGeneration(vllm.PauseGenerationRequest(mode=mode))

    async def resume(self, router: int = 0) -> None:
        await self.controls[router].ResumeGeneration(vllm.ResumeGenerationRequest())

    async def is_paused(self, router: int = 0) -> bool:
        return (await self.controls[router].IsPaused(vllm.IsPausedRequest())).paused

    async def whole(self, router: int = 0, **fields: object) -> Received:
        request = pb.GenerateRequest(**fields)  # type: ignore[arg-type]
        request.MergeFrom(REQUEST)
        return await receive(self.stubs[router].Generate(request))

    async def half(self) -> tuple[asyncio.Task[Received], Received]:
        """Begins a request, and holds the workers once it has some tokens. Opening the gates lets them go on."""
        begun = Received()
        for gate in self.gates:
            gate.first = 8
            gate.close()
        call = self.stubs[0].Generate(REQUEST)
        task = asyncio.create_task(receive(call, into=begun))
        reached = [asyncio.to_thread(gate.reached.wait, 30) for gate in self.gates]
        _, pending = await asyncio.wait(map(asyncio.ensure_future, reached), return_when=asyncio.FIRST_COMPLETED)
        for gate in self.gates:
            gate.reached.set()
        await asyncio.gather(*pending)
        return task, begun

    def open(self) -> None:
        for gate in self.gates:
            gate.open()


@contextlib.asynccontextmanager
async def running(directory: Path, **router_options: Any) -> AsyncIterator[Cluster]:
    options = make_options(directory, served_model_name="test-model", data_parallel_size=2)
    gates = [Gate(10**9), Gate(10**9)]
    cluster = Cluster(options, gates)
    async with contextlib.AsyncExitStack() as stack:
        for replica, gate in enumerate(gates):
            await stack.enter_async_context(running_scheduler(options, replica))
            await stack.enter_async_context(running_worker(options, model=MODEL, replica=replica, before_step=gate))
            stack.callback(gate.open)
        addresses = [options.scheduler_address(replica) for replica in range(2)]
        for _ in range(2):
            server, stub = await stack.enter_async_context(running_router(addresses, compat="vllm", **router_options))
            await server.wait_ready()
            await server._replicas.all_ready.wait()
            cluster.stubs.append(stub)
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{server.port}"))
            cluster.controls.append(ControlStub(channel))
        yield cluster


async def refused(call: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    return error.value.details() or ""


async def test_wait_lets_requests_finish_and_takes_no_new_ones(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        expected = (await cluster.whole()).token_ids
        task, _ = await cluster.half()
        pausing = asyncio.create_task(cluster.pause(vllm.PAUSE_MODE_WAIT))
        while not await cluster.is_paused(1):
            pass
        # The pause has begun, and is not complete while a request runs.
        assert "paused" in await refused(cluster.whole(router=1))
        assert not pausing.done()
        cluster.open()
        assert (await task).token_ids == expected
        await asyncio.wait_for(pausing, 30)
        for router in range(2):
            assert "paused" in await refused(cluster.whole(router=router))
        await cluster.resume(router=1)
        assert not await cluster.is_paused()
        assert (await cluster.whole(router=1)).token_ids == expected


async def test_abort_ends_requests_with_what_they_have(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        expected = (await cluster.whole()).token_ids
        task, begun = await cluster.half()
        pausing = asyncio.create_task(cluster.pause(vllm.PAUSE_MODE_UNSPECIFIED, router=1))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await task
        assert error.value.code() is grpc.StatusCode.CANCELLED
        cluster.open()
        await asyncio.wait_for(pausing, 30)
        held = begun.token_ids
        assert held
        assert all(ids == expected[choice][: len(ids)] for choice, ids in held.items())
        assert "paused" in await refused(cluster.whole())
        await cluster.resume()
        assert (await cluster.whole()).token_ids == expected


async def test_keep_freezes_streams_and_queues_new_ones(tmp_path: Path) -> None:
    async with running(tmp_path, replica_stall_timeout=0.5) as cluster:
        expected = (await cluster.whole()).token_ids
        task, begun = await cluster.half()
        pausing = asyncio.create_task(cluster.pause(vllm.PAUSE_MODE_KEEP))
        while not await cluster.is_paused():
            pass
        cluster.open()
        await asyncio.wait_for(pausing, 30)
        num_held = sum(map(len, begun.token_ids.values()))
        other = asyncio.create_task(cluster.whole(router=1))
        # Longer than replica_stall_timeout: a frozen replica is no stalled one.
        await asyncio.sleep(1.2)
        assert not task.done()
        assert not other.done()
        assert sum(map(len, begun.token_ids.values())) <= num_held + 2
        await cluster.resume()
        assert (await task).token_ids == (await other).token_ids == expected


async def test_pausing_empties_the_prefix_cache_unless_told_otherwise(tmp_path: Path) -> None:
    options = make_options(tmp_path)
    async with (
        running_scheduler(options) as server,
        running_worker(options),
        RouterEnd(options.scheduler_address(0)) as router,
        grpc.aio.insecure_channel(options.scheduler_address(0)) as channel,
    ):
        stub: Any = SchedulerStub(channel)
        await router.finish(await router.submit(list(range(30, 60)), max_tokens=1))
        for clear_cache, num_left in ((False, 3), (True, 0)):
            request = wire.PauseRequest(mode=wire.PAUSE_MODE_WAIT, clear_cache=clear_cache)
            assert (await stub.Pause(request)).mode == wire.PAUSE_MODE_WAIT
            assert server.step_loop.core is not None
            assert len(server.step_loop.core.cached_hashes()) == num_left


async def test_only_admins_pause(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    secrets = {"admin": "a" * 32, "other": "b" * 32}
    keys.write_text(
        f"keys:\n- {{name: admin, key: {secrets['admin']}, admin: true}}\n- {{name: other, key: {secrets['other']}}}\n"
    )
    keys.chmod(0o600)
    async with running(tmp_path, api_keys_file=str(keys)) as cluster:
        control = cluster.controls[0]
        for name, code in (("other", grpc.StatusCode.PERMISSION_DENIED), ("", grpc.StatusCode.UNAUTHENTICATED)):
            metadata = [("authorization", f"Bearer {secrets[name]}")] if name else []
            for call, request in (
                (control.PauseGeneration, vllm.PauseGenerationRequest()),
                (control.ResumeGeneration, vllm.ResumeGenerationRequest()),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await call(request, metadata=metadata)
                assert error.value.code() is code
        as_admin = [("authorization", f"Bearer {secrets['admin']}")]
        await control.PauseGeneration(vllm.PauseGenerationRequest(), metadata=as_admin)
        assert (await control.IsPaused(vllm.IsPausedRequest(), metadata=as_admin)).paused
        await control.ResumeGeneration(vllm.ResumeGenerationRequest(), metadata=as_admin)


async def test_a_replica_that_does_not_answer_is_named(tmp_path: Path) -> None:
    options = make_options(tmp_path, served_model_name="test-model")
    async with running_scheduler(options), running_worker(options, model=MODEL):
        addresses = [options.scheduler_address(0), f"unix:{tmp_path}/away.sock"]
        async with running_router(addresses, compat="vllm") as (server, _):
            is_there = asyncio.Event()
            server._replicas.subscribe(lambda replicas: is_there.set() if replicas.num_ready else None)
            await asyncio.wait_for(is_there.wait(), 30)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
                control: Any = ControlStub(channel)
                details = await refused(control.PauseGeneration(vllm.PauseGenerationRequest(), timeout=20))
                assert "away.sock" in details
                assert "1 replicas have done it" in details


async def test_kv_event_sources_are_those_of_all_replicas(tmp_path: Path) -> None:
    endpoints: dict[str, Any] = {"kv_events_endpoint": "tcp://*:5557", "kv_events_replay_endpoint": "ipc:///run/replay"}
    addresses = [f"unix:{tmp_path}/{name}.sock" for name in ("one", "two")]
    async with (
        running_router(addresses, compat="vllm", kv_events_topic="kv", **endpoints) as (server, _),
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        control: Any = ControlStub(channel)
        sources = (await control.GetKvEventSources(vllm.GetKvEventSourcesRequest())).sources
    assert [(each.data_parallel_rank, each.endpoint, each.replay_endpoint) for each in sources] == [
        (0, "tcp://*:5557", "ipc:///run/replay"),
        (1, "tcp://*:5558", "ipc:///run/replay-1"),
    ]
    assert {(each.transport, each.encoding, each.topic, each.buffer_steps) for each in sources} == {
        ("zmq", "msgpack", "kv", 10_000)
    }
