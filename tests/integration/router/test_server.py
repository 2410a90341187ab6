"""The router as a server: health, reflection, the small calls, metrics, drain; and as a process: exit codes."""

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from protos import inference_pb2 as pb
from protos.inference_pb2_grpc import InferenceStub
from router.replicas import replica as replica_module
from router.replicas.health.pace import Pace, PaceSettings
from router.telemetry.metrics import RouterMetrics
from tests.fakes.routers import receive, running_router, running_schedulers, smollm2_tokenizer, socket_address
from tests.fakes.scheduler import FakeScheduler, model_info
from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]
SERVICE = "octavo.v1.Inference"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
async def scheduler(tmp_path: Path) -> AsyncIterator[FakeScheduler]:
    fake = FakeScheduler(socket_address(tmp_path, "one"))
    async with running_schedulers(fake):
        yield fake


def _request(**sampling: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt="Hello", sampling=pb.SamplingParams(**({"max_tokens": 5} | sampling)))  # type: ignore[arg-type, operator]


async def _health(channel: grpc.aio.Channel, service: str) -> int:
    # The generated stubs' types are those of the synchronous ones.
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


def _watch(channel: grpc.aio.Channel) -> AsyncIterator[health_pb2.HealthCheckResponse]:
    """The readiness now and after each change."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE), wait_for_ready=True)


async def _until(watch: AsyncIterator[health_pb2.HealthCheckResponse], status: int) -> None:
    async for response in watch:
        if response.status == status:
            return


async def test_health_tells_life_from_readiness(tmp_path: Path) -> None:
    fake = FakeScheduler(socket_address(tmp_path, "late"))
    async with (
        running_router([fake.address]) as (server, _),
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        assert [await _health(channel, name) for name in ("", SERVICE)] == [SERVING, NOT_SERVING]
        assert server.readiness()[0] is False
        watch = _watch(channel)
        seen = aiter(watch)
        assert (await anext(seen)).status == NOT_SERVING
        async with running_schedulers(fake):
            assert (await anext(seen)).status == SERVING
            assert server.readiness() == (True, f"{fake.address} is ready")
            fake.workers_ready = False
            fake.send_load()
            assert (await anext(seen)).status == NOT_SERVING
            assert "its workers are away" in server.readiness()[1]
        assert await _health(channel, "") == SERVING


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_lists_the_services(scheduler: FakeScheduler, version: str) -> None:
    async with (
        running_router([scheduler.address]) as (server, _),
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        call: Any = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        names = [service.name for service in (await call.read()).list_services_response.service]
        assert {SERVICE, "octavo.v1.Admin"} <= set(names)
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE))
        assert (await call.read()).file_descriptor_response.file_descriptor_proto
        await call.done_writing()
        call.cancel()


async def test_the_small_calls(scheduler: FakeScheduler) -> None:
    tokenizer = smollm2_tokenizer()
    async with running_router([scheduler.address]) as (server, stub):
        await server.wait_ready()
        assert await stub.GetModel(pb.GetModelRequest(model="test-model")) == model_info()
        tokenized = await stub.Tokenize(pb.TokenizeRequest(prompt="héllo"))
        assert (list(tokenized.token_ids), tokenized.max_model_len) == (tokenizer.encode("héllo"), 2048)
        chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")], add_generation_prompt=False)
        assert list((await stub.Tokenize(pb.TokenizeRequest(chat=chat))).token_ids) == tokenizer.encode_chat(chat)
        ids = [1, *tokenized.token_ids]
        assert (await stub.Detokenize(pb.DetokenizeRequest(token_ids=ids))).text == "<|im_start|>héllo"
        skipped = pb.DetokenizeRequest(token_ids=[*ids, 4_000_000], skip_special_tokens=True)
        assert (await stub.Detokenize(skipped)).text == "héllo"


async def test_metrics_count_what_happened(scheduler: FakeScheduler) -> None:
    async with running_router([scheduler.address]) as (server, stub):
        await server.wait_ready()
        await receive(stub.Generate(_request()))
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.GenerateUnary(_request(top_p=2))
        value = server.metrics.registry.get_sample_value
        assert value("octavo_requests_total", {"outcome": "length"}) == 1
        assert value("octavo_requests_total", {"outcome": "invalid_argument"}) == 1
        assert value("octavo_generation_tokens_total") == 5
        assert value("octavo_prompt_tokens_total") == len(smollm2_tokenizer().encode("Hello"))
        assert value("octavo_time_to_first_token_seconds_count") == 1
        assert value("octavo_inter_token_latency_seconds_count") == 4
        assert value("octavo_e2e_request_latency_seconds_count") == 1
        assert value("octavo_streams") == 0
        assert value("octavo_replica_ready", {"replica": scheduler.address}) == 1
        assert value("octavo_routing_decisions_total", {"policy": "least_loaded", "reason": "only"}) == 1


async def test_a_drain_lets_running_streams_finish_and_refuses_new_ones(scheduler: FakeScheduler) -> None:
    scheduler.pause_at = 2
    async with (
        running_router([scheduler.address]) as (server, stub),
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        await server.wait_ready()
        call = stub.Generate(_request())
        received = await receive(call, until=lambda r: len(r.token_ids.get(0, [])) == 2)
        drain = asyncio.create_task(server.drain())
        await _until(_watch(channel), NOT_SERVING)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GenerateUnary(_request())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await scheduler.resume_steps()
        received = await receive(call, into=received)
        assert received.finished is not None
        await drain


async def test_what_outlasts_the_drain_ends_unavailable_and_resumable(scheduler: FakeScheduler) -> None:
    scheduler.pause_at = 2
    async with running_router([scheduler.address], drain_timeout=0.1) as (server, stub):
        await server.wait_ready()
        call = stub.Generate(_request())
        received = await receive(call, until=lambda r: len(r.token_ids.get(0, [])) == 2)
        await server.drain()
        stop = asyncio.create_task(server.stop())
        with pytest.raises(grpc.aio.AioRpcError, match="resume") as caught:
            await receive(call, into=received)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await stop


async def _start(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router", *arguments, cwd=ROOT, stderr=asyncio.subprocess.PIPE
    )


@contextlib.asynccontextmanager
async def _serving(
    scheduler: FakeScheduler, *arguments: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, grpc.aio.Channel, AsyncIterator[health_pb2.HealthCheckResponse]]]:
    """Runs a router until its exit, and waits until it serves. Yields its readiness after each change, too."""
    port = free_port()
    own = ["--port", str(port), "--metrics-port=0", "--scheduler-addresses", scheduler.address]
    process = await _start(*own, "--served-model-name", "test-model", *arguments)
    try:
        # Its start alone may take half a minute on a busy machine.
        async with asyncio.timeout(120), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            watch = _watch(channel)
            await _until(watch, SERVING)
            yield process, channel, watch
            assert await process.wait() == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


async def test_the_process_serves_drains_on_sigterm_and_exits_0(scheduler: FakeScheduler) -> None:
    scheduler.pause_at = 2
    async with _serving(scheduler) as (process, channel, _):
        call = InferenceStub(channel).Generate(_request())
        received = await receive(call, until=lambda r: len(r.token_ids.get(0, [])) == 2)
        process.send_signal(signal.SIGTERM)
        await scheduler.resume_steps()
        received = await receive(call, into=received)
        assert received.finished is not None
    assert process.stderr is not None
    assert b"Traceback" not in await process.stderr.read()


async def test_a_second_signal_ends_the_drain(scheduler: FakeScheduler) -> None:
    scheduler.pause_at = 2
    async with _serving(scheduler, "--drain-timeout", "600") as (process, channel, watch):
        call = InferenceStub(channel).Generate(_request())
        received = await receive(call, until=lambda r: len(r.token_ids.get(0, [])) == 2)
        process.send_signal(signal.SIGINT)
        await _until(watch, NOT_SERVING)
        process.send_signal(signal.SIGINT)
        with pytest.raises(grpc.aio.AioRpcError, match="shutting down"):
            await receive(call, into=received)


async def test_what_can_never_work_exits_2_with_a_line_that_says_what_would() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        cases = [
            (["--port", port, "--metrics-port", "0"], f"port={port}: Address already in use; choose another port"),
            (["--port", "0", "--metrics-port", port], f"metrics_port={port}: Address already in use"),
            (["--max-num-sqes", "3"], "--max-num-sqes"),
            (["--model", "/nonexistent/model.gguf"], "no such file"),
            (["--tokenizer", "/nonexistent"], "no such directory"),
        ]
        processes = [await _start(*arguments) for arguments, _ in cases]
        for process, (_, message) in zip(processes, cases, strict=True):
            _, stderr = await asyncio.wait_for(process.communicate(), 120)
            assert process.returncode == 2, stderr.decode()
            assert message in stderr.decode()
            assert "Traceback" not in stderr.decode()


async def test_a_replica_that_is_told_to_stop_as_its_session_ends_does_stop(
    scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both happen at the same time when a whole cluster is told to end."""
    opened, ending, released = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow_writer(call: object, session: object) -> None:
        opened.set()
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            await released.wait()

    monkeypatch.setattr(replica_module, "_write", slow_writer)
    options = replica_module.ReplicaOptions(router_id="a router", model_name="test-model", silence_timeout=10.0)
    replica = replica_module.Replica(
        0,
        scheduler.address,
        options,
        RouterMetrics(),
        pace=Pace(PaceSettings(), []),
        prefix_index=None,
        on_change=lambda: None,
    )
    task = asyncio.create_task(replica.run())
    await opened.wait()
    await scheduler.kill()
    await ending.wait()
    task.cancel()
    await asyncio.sleep(0)
    released.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 60)
    assert replica.session is None
