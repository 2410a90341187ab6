"""vllm.grpc.engine.VllmEngine on the router, called with the SMG gateway's messages; a fake scheduler computes."""

import asyncio
import contextlib
import hashlib
import io
import sys
import zipfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc.aio import EOF  # type: ignore[attr-defined]
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from protos import inference_pb2 as pb
from router.compat import engines
from router.errors import MissingPackageError
from router.server import RouterServer
from router.streams import outbox
from tests.fakes.routers import receive, running_router, running_schedulers, smollm2_tokenizer, socket_address
from tests.fakes.scheduler import FakeScheduler, model_info

SERVICE = "vllm.grpc.engine.VllmEngine"


@pytest.fixture
async def scheduler(tmp_path: Path) -> AsyncIterator[FakeScheduler]:
    defaults = pb.SamplingParams(temperature=0.5, top_k=7)
    model = model_info(default_sampling=defaults)
    fake = FakeScheduler(socket_address(tmp_path, "one"), model=model, features=["constraint"])
    async with running_schedulers(fake):
        yield fake


@pytest.fixture
async def router(scheduler: FakeScheduler) -> AsyncIterator[tuple[RouterServer, Any]]:
    async with running_router([scheduler.address], compat="smg") as (server, stub):
        await server.wait_ready()
        yield server, stub


@pytest.fixture
async def channel(router: tuple[RouterServer, Any]) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{router[0].port}") as channel:
        yield channel


@pytest.fixture
async def engine(channel: grpc.aio.Channel) -> Any:
    # The generated stub's types are those of the synchronous one.
    return VllmEngineStub(channel)


def _request(stream: bool, **sampling: object) -> vllm.GenerateRequest:
    given: dict[str, Any] = {"max_tokens": 8, "seed": 5} | sampling
    return vllm.GenerateRequest(
        request_id="mine",
        tokenized=vllm.TokenizedInput(original_text="ignored", input_ids=[5, 6, 7]),
        sampling_params=vllm.SamplingParams(**given),
        stream=stream,
    )


async def _expected(stub: Any, **sampling: Any) -> Any:
    given: dict[str, Any] = {"temperature": 1, "top_k": 0, "max_tokens": 8, "seed": 5} | sampling
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6, 7]), sampling=pb.SamplingParams(**given))
    return await receive(stub.Generate(request))


async def _read_all(call: Any) -> None:
    while await call.read() is not EOF:
        pass


async def test_streamed_and_whole_are_what_our_own_call_gives(router: tuple[RouterServer, Any], engine: Any) -> None:
    expected = await _expected(router[1], n=2)
    token_ids: dict[int, list[int]] = {0: [], 1: []}
    completes = []
    async for answer in engine.Generate(_request(True, n=2)):
        assert not (completes and answer.HasField("chunk")), "a chunk after the message that completes"
        if answer.HasField("chunk"):
            token_ids[answer.chunk.index] += answer.chunk.token_ids
            assert (answer.chunk.prompt_tokens, answer.chunk.completion_tokens) == (3, len(answer.chunk.token_ids))
        else:
            completes.append(answer.complete)
    assert token_ids == expected.token_ids
    assert [(each.index, each.finish_reason, each.cached_tokens) for each in completes] == [
        (0, "length", 4),
        (1, "length", 4),
    ]

    whole = [answer.complete async for answer in engine.Generate(_request(False, n=2))]
    assert {each.index: list(each.output_ids) for each in whole} == expected.token_ids
    assert [(each.prompt_tokens, each.completion_tokens) for each in whole] == [(3, 8), (3, 8)]


async def test_text_is_tokenized_and_every_way_to_sample_arrives(engine: Any, scheduler: FakeScheduler) -> None:
    given: dict[str, Any] = {
        "temperature": 0.25,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.125,
        "frequency_penalty": 1.5,
        "min_tokens": 2,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.25,
        "ignore_eos": True,
        "max_tokens": 4,
        "logprobs": 2,
    }
    parameters = vllm.SamplingParams(**given, seed=-1, logit_bias={7: 1.5}, stop_token_ids=[9])
    async for _ in engine.Generate(vllm.GenerateRequest(text="Once upon", sampling_params=parameters)):
        pass
    submitted = scheduler.submitted[0].sampling
    assert {name: getattr(submitted, name) for name in given} == given
    assert (submitted.seed, dict(submitted.logit_bias), list(submitted.stop_token_ids)) == (2**64 - 1, {7: 1.5}, [9])
    assert scheduler.prompts[1] == smollm2_tokenizer().encode("Once upon")


async def test_unset_fields_are_vllms_defaults_and_the_models_are_told(engine: Any, scheduler: FakeScheduler) -> None:
    async for _ in engine.Generate(_request(True)):
        pass
    submitted = scheduler.submitted[0].sampling
    assert (submitted.temperature, submitted.top_p, submitted.top_k, submitted.repetition_penalty) == (1, 1, 0, 1)
    info = await engine.GetModelInfo(vllm.GetModelInfoRequest())
    assert info.default_sampling_params_json == '{"temperature": 0.5, "top_k": 7}'
    assert (info.served_model_name, info.max_context_length, list(info.eos_token_ids)) == ("test-model", 2048, [2])
    assert info.is_generation


async def test_logprobs_of_prompt_and_output(engine: Any) -> None:
    answers = [answer async for answer in engine.Generate(_request(True, logprobs=1, prompt_logprobs=1))]
    chunks = [answer.chunk for answer in answers if answer.HasField("chunk")]
    assert list(chunks[0].input_logprobs.token_ids) == [5, 6, 7]
    assert [each.HasField("value") for each in chunks[0].input_logprobs.token_logprobs] == [False, True, True]
    assert not any(chunk.HasField("input_logprobs") for chunk in chunks[1:])
    for chunk in chunks:
        assert list(chunk.output_logprobs.token_ids) == list(chunk.token_ids)
        assert [list(top.values) for top in chunk.output_logprobs.top_logprobs] == [[-0.5]] * len(chunk.token_ids)


async def test_what_stopped_it_is_told(router: tuple[RouterServer, Any], engine: Any) -> None:
    expected = await _expected(router[1])
    third = expected.token_ids[0][2]
    [answer] = [answer async for answer in engine.Generate(_request(False, stop_token_ids=[third]))]
    assert (answer.complete.finish_reason, answer.complete.matched_token_id) == ("stop", third)
    word = smollm2_tokenizer().decode([third], skip_special_tokens=True)
    [answer] = [answer async for answer in engine.Generate(_request(False, stop=[word]))]
    assert (answer.complete.finish_reason, answer.complete.matched_stop_str) == ("stop", word)


async def test_an_abort_ends_the_stream(engine: Any, scheduler: FakeScheduler) -> None:
    scheduler.pause_at = 3
    call = engine.Generate(_request(True))
    await call.read()
    await engine.Abort(vllm.AbortRequest(request_ids=["unknown", "mine"]))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await _read_all(call)
    assert error.value.code() is grpc.StatusCode.CANCELLED
    await scheduler.wait_until(lambda fake: fake.num_live == 0)


async def test_a_scheduler_that_dies_is_not_noticed(tmp_path: Path) -> None:
    one, two = (FakeScheduler(socket_address(tmp_path, name), pause_at=4) for name in ("one", "two"))
    async with (
        running_schedulers(one, two),
        running_router([one.address, two.address], compat="smg") as (server, stub),
    ):
        await server.wait_ready()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            engine: Any = VllmEngineStub(channel)  # type: ignore[arg-type]
            call = engine.Generate(_request(True))
            token_ids = list((await call.read()).chunk.token_ids)
            holder, other = (one, two) if one.num_live else (two, one)
            other.pause_at = None
            await holder.kill()
            while (answer := await call.read()) is not EOF:
                token_ids += answer.chunk.token_ids
        assert token_ids == (await _expected(stub)).token_ids[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mm_inputs": vllm.MultimodalInputs()}, "mm_inputs is set: images"),
        ({"kv_transfer_params_json": "{}"}, "KV can't be taken over"),
        ({"data_parallel_rank": 1}, "data_parallel_rank=1: this router chooses"),
        ({"tokenized": vllm.TokenizedInput()}, "token_ids.ids is empty"),
        ({"sampling_params": vllm.SamplingParams(regex="(a")}, r"sampling\.constraint\.regex: "),
        ({"sampling_params": vllm.SamplingParams(logprobs=-1)}, "logprobs=-1 asks for all 49152 tokens"),
        ({"sampling_params": vllm.SamplingParams(truncate_prompt_tokens=4)}, "truncate_prompt_tokens=4"),
        ({"sampling_params": vllm.SamplingParams(logit_bias={-1: 1.0})}, r"logit_bias\[-1\]"),
        ({"sampling_params": vllm.SamplingParams(temperature=-1.0)}, "temperature=-1: use a number"),
    ],
)
async def test_what_is_not_there_is_refused_by_name(engine: Any, change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"tokenized": vllm.TokenizedInput(input_ids=[5])} | change
    request = vllm.GenerateRequest(**given)
    with pytest.raises(grpc.aio.AioRpcError, match=message) as error:
        await engine.Generate(request).read()
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_constraints_come_in(engine: Any, scheduler: FakeScheduler) -> None:
    for kind, value in {
        "json_schema": '{"type":"object"}',
        "regex": "a+",
        "json_object": True,
        "choice": vllm.ChoiceConstraint(choices=["yes", "no"]),
    }.items():
        await engine.Generate(_request(False, **{kind: value})).read()
        assert scheduler.submitted[-1].sampling.constraint.WhichOneof("kind") == kind
    assert list(scheduler.submitted[-1].sampling.constraint.choice.texts) == ["yes", "no"]


async def test_calls_that_are_not_there_say_what_is(engine: Any) -> None:
    for call, request in (
        (engine.Embed, vllm.EmbedRequest()),
        (engine.FlushCache, common.FlushCacheRequest()),
        (engine.StartProfile, common.StartProfileRequest()),
        (engine.StopProfile, common.StopProfileRequest()),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match="is not supported: ") as error:
            await call(request)
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
    with pytest.raises(grpc.aio.AioRpcError, match="set kv_events_endpoint"):
        await engine.SubscribeKvEvents(common.SubscribeKvEventsRequest()).read()


async def test_the_tokenizer_comes_as_a_zip_with_its_digest(engine: Any) -> None:
    chunks = [chunk async for chunk in engine.GetTokenizer(common.GetTokenizerRequest())]
    data = b"".join(chunk.data for chunk in chunks)
    assert all(len(chunk.data) <= 64 * 1024 for chunk in chunks)
    assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + [hashlib.sha256(data).hexdigest()]
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        original = smollm2_tokenizer().directory / "tokenizer.json"
        assert archive.read("tokenizer.json") == original.read_bytes()
        assert "tokenizer_config.json" in archive.namelist()


async def test_a_client_that_does_not_read_the_tokenizer_is_left(
    router: tuple[RouterServer, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "UNREAD_S", 0.2)
    left = asyncio.Event()

    @contextlib.contextmanager
    def noting() -> Iterator[None]:
        try:
            with outbox.bounded_write():
                yield
        except asyncio.CancelledError:
            left.set()
            raise

    monkeypatch.setattr(engines, "bounded_write", noting)
    small_windows = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{router[0].port}", options=small_windows) as slow:
        call: Any = VllmEngineStub(slow).GetTokenizer(common.GetTokenizerRequest())
        await call.read()
        async with asyncio.timeout(10):
            await left.wait()


async def test_loads_and_server_are_of_the_whole_cluster(engine: Any) -> None:
    loads = await engine.GetLoads(vllm.GetLoadsRequest())
    [load] = loads.loads
    assert (load.max_total_num_tokens, load.num_used_tokens, load.token_usage) == (16_000, 1600, 0.1)
    info = await engine.GetServerInfo(vllm.GetServerInfoRequest())
    assert (info.server_type, info.data_parallel_size, info.block_size) == ("octavo", 1, 16)


async def test_health_follows_the_replicas(engine: Any, channel: grpc.aio.Channel, scheduler: FakeScheduler) -> None:
    stub: Any = health_pb2_grpc.HealthStub(channel)  # type: ignore[arg-type]
    request = health_pb2.HealthCheckRequest(service=SERVICE)
    watched = stub.Watch(request)
    assert (await watched.read()).status == health_pb2.HealthCheckResponse.SERVING
    assert (await engine.HealthCheck(vllm.HealthCheckRequest())).healthy
    scheduler.workers_ready = False
    scheduler.send_load()
    assert (await watched.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    answer = await engine.HealthCheck(vllm.HealthCheckRequest())
    assert not answer.healthy
    assert "its workers are away" in answer.message


async def test_reflection_shows_it(channel: grpc.aio.Channel) -> None:
    reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]
    call = reflection.ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    listed = {service.name for service in (await call.read()).list_services_response.service}
    assert {SERVICE, "octavo.v1.Inference"} <= listed
    await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE))
    assert (await call.read()).HasField("file_descriptor_response")
    call.cancel()


async def test_without_the_package_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "smg_grpc_proto.generated", None)
    monkeypatch.delitem(sys.modules, "router.compat.smg", raising=False)
    with pytest.raises(MissingPackageError, match=r"install octavo\[smg\]"):
        async with running_router([socket_address(tmp_path, "nobody")], compat="smg"):
            pass
