"""SglangScheduler on the router, called with messages generated from its published .proto file; a fake scheduler
computes, octavo.v1.Inference says what is right."""

import hashlib
import io
import json
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc.aio import EOF  # type: ignore[attr-defined]

from protos import inference_pb2 as pb
from router.compat.protos import sglang_pb2
from router.server import RouterServer
from tests.fakes.routers import receive, running_router, running_schedulers, smollm2_tokenizer, socket_address
from tests.fakes.scheduler import FakeScheduler, hashed_token, model_info
from tests.support.published_protos import differences, message_class, pool_of, smg_protos

SERVICE = "sglang.grpc.scheduler.SglangScheduler"
POOL = pool_of(smg_protos(), "sglang_scheduler.proto")


def published(name: str) -> Any:
    return message_class(POOL, f"sglang.grpc.scheduler.{name}")


Asked, Sampling, Tokenized = published("GenerateRequest"), published("SamplingParams"), published("TokenizedInput")


def _serialized(message: Any) -> bytes:
    return message.SerializeToString()


class Engine:
    """A stub of the published service."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        for method in POOL.FindServiceByName(SERVICE).methods:
            make = channel.unary_stream if method.server_streaming else channel.unary_unary
            answer = message_class(POOL, method.output_type.full_name)
            setattr(
                self,
                method.name,
                make(  # type: ignore[operator]
                    f"/{SERVICE}/{method.name}",
                    request_serializer=_serialized,
                    response_deserializer=answer.FromString,
                ),
            )


@pytest.fixture
async def scheduler(tmp_path: Path) -> AsyncIterator[FakeScheduler]:
    model = model_info(default_sampling=pb.SamplingParams(temperature=0.5, top_k=7))
    fake = FakeScheduler(socket_address(tmp_path, "one"), model=model, features=["constraint", "logprob_token_ids"])
    # The service has no seeds.
    fake.next_token = lambda ids, num_prompt, _, choice: hashed_token(ids, num_prompt, 0, choice)
    fake.likely = lambda token_ids: [(20, -0.5), (21, -1.5), (22, -2.5)]
    async with running_schedulers(fake):
        yield fake


@pytest.fixture
async def router(scheduler: FakeScheduler) -> AsyncIterator[tuple[RouterServer, Any]]:
    async with running_router([scheduler.address], compat="sglang") as (server, stub):
        await server.wait_ready()
        yield server, stub


@pytest.fixture
async def engine(router: tuple[RouterServer, Any]) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{router[0].port}") as channel:
        yield Engine(channel)


def asked(*, stream: bool = True, sampling: dict[str, Any] | None = None, **fields: Any) -> Any:
    given = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "max_new_tokens": 8, "n": 1}
    return Asked(
        request_id="mine",
        tokenized=Tokenized(original_text="ignored", input_ids=[5, 6, 7]),
        sampling_params=Sampling(**(given | (sampling or {}))),
        stream=stream,
        **({"logprob_start_len": -1} | fields),
    )


async def expected(stub: Any, **sampling: Any) -> Any:
    given: dict[str, Any] = {"temperature": 0, "max_tokens": 8} | sampling
    return await receive(
        stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6, 7]), sampling=pb.SamplingParams(**given)))
    )


async def read_all(call: Any) -> None:
    if hasattr(call, "read"):
        while await call.read() is not EOF:
            pass
    else:
        await call


async def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await read_all(call)
    return error.value.code(), error.value.details() or ""


def test_names_and_field_numbers_are_the_published_ones() -> None:
    theirs = {"TokenizerChunk": "smg.grpc.common.GetTokenizerChunk", "GetTokenizerRequest": None, "Unread": None}
    seen = []
    for name, message in sglang_pb2.DESCRIPTOR.message_types_by_name.items():
        full_name = theirs.get(name, message.full_name)
        if full_name is not None:
            assert differences(message, POOL.FindMessageTypeByName(full_name)) == []
            seen.append(name)
    assert len(seen) > 20
    methods = {method.name: method.server_streaming for method in POOL.FindServiceByName(SERVICE).methods}
    own = sglang_pb2.DESCRIPTOR.services_by_name["SglangScheduler"].methods
    assert {method.name: method.server_streaming for method in own} == methods


async def test_streamed_and_whole_are_what_our_own_call_gives(router: tuple[RouterServer, Any], engine: Any) -> None:
    right = await expected(router[1], n=2)
    token_ids: dict[int, list[int]] = {0: [], 1: []}
    completes = []
    async for answer in engine.Generate(asked(sampling={"n": 2})):
        assert answer.request_id == "mine"
        if answer.HasField("chunk"):
            chunk = answer.chunk
            token_ids[chunk.index] += chunk.token_ids
            # The counts are of all tokens so far.
            assert (chunk.prompt_tokens, chunk.completion_tokens) == (3, len(token_ids[chunk.index]))
        else:
            completes.append(answer.complete)
    assert token_ids == right.token_ids
    assert [(each.index, each.finish_reason, each.completion_tokens) for each in completes] == [
        (0, "length", 8),
        (1, "length", 8),
    ]
    whole = [answer.complete async for answer in engine.Generate(asked(stream=False, sampling={"n": 2}))]
    assert {each.index: list(each.output_ids) for each in whole} == right.token_ids


async def test_every_way_to_sample_arrives(engine: Any, scheduler: FakeScheduler) -> None:
    given = {
        "temperature": 0.25,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.125,
        "frequency_penalty": 1.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.25,
        "ignore_eos": True,
    }
    others = {"max_new_tokens": 4, "min_new_tokens": 2, "logit_bias": {"7": 1.5}, "stop_token_ids": [9]}
    async for _ in engine.Generate(asked(sampling=given | others)):
        pass
    submitted = scheduler.submitted[0].sampling
    assert {name: getattr(submitted, name) for name in given} == given
    assert (submitted.max_tokens, submitted.min_tokens) == (4, 2)
    assert (dict(submitted.logit_bias), list(submitted.stop_token_ids)) == ({7: 1.5}, [9])
    for kind, own in (("regex", "regex"), ("json_schema", "json_schema"), ("ebnf_grammar", "grammar")):
        text = {"regex": "a+", "json_schema": '{"type":"object"}', "ebnf_grammar": 'root ::= "a"'}[kind]
        async for _ in engine.Generate(asked(sampling={kind: text})):
            pass
        assert scheduler.submitted[-1].sampling.constraint.WhichOneof("kind") == own


async def test_logprobs_of_prompt_and_output(engine: Any) -> None:
    fields = {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 1}
    chunks = [each.chunk async for each in engine.Generate(asked(**fields)) if each.HasField("chunk")]
    assert list(chunks[0].input_logprobs.token_ids) == [6, 7]
    assert all(each.HasField("value") for each in chunks[0].input_logprobs.token_logprobs)
    assert not any(chunk.HasField("input_logprobs") for chunk in chunks[1:])
    for chunk in chunks:
        assert list(chunk.output_logprobs.token_ids) == list(chunk.token_ids)
        assert [len(top.values) for top in chunk.output_logprobs.top_logprobs] == [2] * len(chunk.token_ids)
    whole = asked(stream=False, return_logprob=True, logprob_start_len=0)
    [answer] = [each.complete async for each in engine.Generate(whole)]
    assert [each.HasField("value") for each in answer.input_logprobs.token_logprobs] == [False, True, True]
    assert len(answer.output_logprobs.token_logprobs) == 8
    own = asked(stream=False, return_logprob=True, token_ids_logprob=[21, 22])
    [answer] = [each.complete async for each in engine.Generate(own)]
    assert len(answer.output_logprobs.token_ids_logprobs) == 8
    assert not answer.output_logprobs.top_logprobs


async def test_what_stopped_it_is_told(router: tuple[RouterServer, Any], engine: Any) -> None:
    third = (await expected(router[1])).token_ids[0][2]
    [answer] = [each async for each in engine.Generate(asked(stream=False, sampling={"stop_token_ids": [third]}))]
    assert (answer.complete.finish_reason, answer.complete.matched_token_id) == ("stop", third)


async def test_an_abort_ends_the_stream_and_an_unknown_id_is_told(engine: Any, scheduler: FakeScheduler) -> None:
    scheduler.pause_at = 3
    call = engine.Generate(asked())
    await call.read()
    abort = published("AbortRequest")
    assert not (await engine.Abort(abort(request_id="unknown"))).success
    assert (await engine.Abort(abort(request_id="mine", reason="gone"))).success
    code, _ = await refused(call)
    assert code is grpc.StatusCode.CANCELLED
    await scheduler.wait_until(lambda fake: fake.num_live == 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mm_inputs": published("MultimodalInputs")(image_urls=["x"])}, "mm_inputs is set: images"),
        ({"disaggregated_params": published("DisaggregatedParams")(bootstrap_host="h")}, "disaggregated_params is set"),
        ({"custom_logit_processor": "x"}, "custom_logit_processor is set"),
        ({"return_hidden_states": True}, "return_hidden_states is set"),
        ({"input_embeds": [0.5]}, "input_embeds is set"),
        ({"lora_id": "a"}, "lora_id is set"),
        ({"data_parallel_rank": 1}, "data_parallel_rank=1: this router chooses"),
        ({"tokenized": Tokenized()}, "token_ids.ids is empty"),
        ({"return_logprob": True, "top_logprobs_num": -1}, "top_logprobs_num=-1"),
        ({"return_logprob": True, "top_logprobs_num": 1, "token_ids_logprob": [2]}, "use one of them"),
        ({"sampling_params": Sampling(top_k=-2)}, "top_k=-2"),
        ({"sampling_params": Sampling(regex="(a")}, "sampling.constraint.regex: "),
        ({"sampling_params": Sampling(logit_bias={"x": 1.0})}, "logit_bias['x']"),
        ({"sampling_params": Sampling(temperature=-1.0)}, "temperature=-1"),
    ],
)
async def test_what_is_not_there_is_refused_by_name(engine: Any, change: dict[str, Any], message: str) -> None:
    request = Asked(**({"tokenized": Tokenized(input_ids=[5]), "logprob_start_len": -1} | change))
    code, details = await refused(engine.Generate(request))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert message in details


async def test_the_cluster_is_described(router: tuple[RouterServer, Any], engine: Any) -> None:
    assert (await engine.HealthCheck(published("HealthCheckRequest")())).healthy
    model = await engine.GetModelInfo(published("GetModelInfoRequest")())
    assert (model.served_model_name, model.max_context_length, model.is_generation) == ("test-model", 2048, True)
    assert json.loads(model.default_sampling_params_json) == {"temperature": 0.5, "top_k": 7}
    info = await engine.GetServerInfo(published("GetServerInfoRequest")())
    assert info.server_args["served_model_name"] == "test-model"
    loads = await engine.GetLoads(published("GetLoadsRequest")())
    assert (loads.dp_rank_count, len(loads.loads)) == (1, 1)
    assert loads.loads[0].max_total_num_tokens == info.max_total_num_tokens > 0
    empty = message_class(POOL, "smg.grpc.common.GetTokenizerRequest")()
    chunks = [chunk async for chunk in engine.GetTokenizer(empty)]
    data = b"".join(chunk.data for chunk in chunks)
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.read("tokenizer.json") == (smollm2_tokenizer().directory / "tokenizer.json").read_bytes()


async def test_calls_that_do_nothing_say_why(engine: Any) -> None:
    unread = [
        method.name
        for method in sglang_pb2.DESCRIPTOR.services_by_name["SglangScheduler"].methods
        if method.input_type is sglang_pb2.Unread.DESCRIPTOR
    ]
    assert len(unread) == 8
    for name in unread:
        request = message_class(POOL, POOL.FindServiceByName(SERVICE).methods_by_name[name].input_type.full_name)()
        code, details = await refused(getattr(engine, name)(request))
        assert code is grpc.StatusCode.UNIMPLEMENTED
        assert details.startswith(f"{name} is not supported: ")
