"""vllm.Inference and vllm.Control on the router; a fake scheduler computes, octavo.v1.Inference says what is right."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import inference_pb2 as pb
from router.compat.protos import vllm_pb2 as vllm
from router.compat.protos.vllm_pb2_grpc import ControlStub, InferenceStub
from router.compat.vllm_messages import generate_request
from router.errors import InvalidRequest
from router.server import RouterServer
from tests.fakes.routers import receive, running_router, running_schedulers, smollm2_tokenizer, socket_address
from tests.fakes.scheduler import EOS, FakeScheduler, scripted

PROMPT = "Once upon a time"


@pytest.fixture
async def scheduler(tmp_path: Path) -> AsyncIterator[FakeScheduler]:
    fake = FakeScheduler(socket_address(tmp_path, "one"), features=["constraint", "allowed_token_ids"])
    fake.likely = lambda token_ids: [(20, -0.5), (21, -1.5), (22, -2.5)]
    async with running_schedulers(fake):
        yield fake


@pytest.fixture
async def router(scheduler: FakeScheduler) -> AsyncIterator[tuple[RouterServer, Any]]:
    async with running_router([scheduler.address], compat="vllm") as (server, stub):
        await server.wait_ready()
        yield server, stub


@pytest.fixture
async def channel(router: tuple[RouterServer, Any]) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{router[0].port}") as channel:
        yield channel


@pytest.fixture
async def inference(channel: grpc.aio.Channel) -> Any:
    # The generated stub's types are those of the synchronous one.
    return InferenceStub(channel)


@pytest.fixture
async def control(channel: grpc.aio.Channel) -> Any:
    return ControlStub(channel)


def _asked(**fields: Any) -> vllm.GenerateRequest:
    stopping = fields.pop("stopping", vllm.StoppingCriteria(max_new_tokens=12))
    sampling = fields.pop("sampling", vllm.RandomSampling(seed=7))
    return vllm.GenerateRequest(**{"text": PROMPT, **fields}, stopping=stopping, sampling=sampling)


async def _stream(inference: Any, request: vllm.GenerateRequest) -> list[vllm.GenerateResponse]:
    return [reply async for reply in inference.GenerateStream(request)]


async def _read(call: Any) -> None:
    if hasattr(call, "__aiter__"):
        async for _ in call:
            pass
    else:
        await call


async def _refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await _read(call)
    return error.value.code(), error.value.details() or ""


async def test_a_stream_says_what_octavos_own_call_says(inference: Any, router: tuple[RouterServer, Any]) -> None:
    _, own = router
    sampling = pb.SamplingParams(max_tokens=12, seed=7, n=2, temperature=0)
    expected = await receive(own.Generate(pb.GenerateRequest(prompt=PROMPT, sampling=sampling)))
    shown = vllm.ResponseOptions(output_token_ids=True, prompt_token_ids=True)
    request = _asked(response=shown, sampling=vllm.RandomSampling(seed=7, num_sequences=2))
    replies = await _stream(inference, request)
    text, token_ids = {0: "", 1: ""}, {0: list[int](), 1: list[int]()}
    for reply in replies:
        assert reply.outputs.num_tokens == len(reply.outputs.token_ids)
        text[reply.outputs.index] += reply.outputs.text
        token_ids[reply.outputs.index] += reply.outputs.token_ids
    assert (text, token_ids) == (expected.text, expected.token_ids)
    assert [reply.HasField("prompt_info") for reply in replies].index(True) == 0
    assert sum(reply.HasField("prompt_info") for reply in replies) == 1
    assert list(replies[0].prompt_info.token_ids) == list(expected.started.prompt_token_ids)
    finishes = [reply.outputs.finish_info for reply in replies if reply.outputs.HasField("finish_info")]
    assert [(each.num_output_tokens, each.finish_reason) for each in finishes] == [(12, vllm.FinishInfo.LENGTH)] * 2


async def test_the_whole_answer_is_the_stream_in_one_message(inference: Any) -> None:
    shown = vllm.ResponseOptions(output_token_ids=True, output_logprobs=True)
    replies = await _stream(inference, _asked(response=shown))
    whole = await inference.Generate(_asked(response=shown))
    assert whole.outputs.text == "".join(reply.outputs.text for reply in replies)
    assert list(whole.outputs.token_ids) == [token for reply in replies for token in reply.outputs.token_ids]
    assert whole.outputs.num_tokens == len(whole.outputs.logprobs) == len(whole.outputs.ranks) == 12
    assert whole.prompt_info.num_prompt_tokens == len(smollm2_tokenizer().encode(PROMPT, 100, add_special_tokens=True))
    code, message = await _refusal(inference.Generate(_asked(sampling=vllm.RandomSampling(num_sequences=2))))
    assert (code, "num_sequences=2" in message) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_only_what_is_asked_for_is_shown(inference: Any) -> None:
    whole = await inference.Generate(_asked())
    assert whole.outputs.text
    assert not whole.outputs.token_ids
    assert not whole.outputs.logprobs
    assert not whole.prompt_info.token_ids
    whole = await inference.Generate(_asked(response=vllm.ResponseOptions(output_text=False)))
    assert (whole.outputs.text, whole.outputs.num_tokens) == ("", 12)


async def test_logprobs_and_candidates_of_output_and_prompt(inference: Any) -> None:
    shown = vllm.ResponseOptions(
        output_candidates=vllm.CandidateTokens(top_n=2),
        prompt_logprobs=True,
        prompt_candidates=vllm.CandidateTokens(top_n=1),
    )
    whole = await inference.Generate(_asked(response=shown))
    for candidates in whole.outputs.candidate_tokens:
        assert [(each.id, each.logprob) for each in candidates.tokens] == [(20, -0.5), (21, -1.5)]
    assert len(whole.outputs.candidate_tokens) == 12
    info = whole.prompt_info
    assert info.num_prompt_tokens == len(info.logprobs) == len(info.ranks) == len(info.candidate_tokens)
    assert (info.logprobs[0], info.ranks[0]) == (0, 0)
    listed = vllm.CandidateTokens(token_ids=vllm.TokenIds(ids=[5]))
    code, message = await _refusal(inference.Generate(_asked(response=vllm.ResponseOptions(prompt_candidates=listed))))
    assert (code, "prompt_candidates" in message) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_an_end_says_what_ended_it(inference: Any, scheduler: FakeScheduler) -> None:
    scheduler.next_token = scripted([100, 101, 102])
    finish = (await inference.Generate(_asked())).outputs.finish_info
    assert (finish.finish_reason, finish.eos_token_id) == (vllm.FinishInfo.STOP, EOS)
    stopping = vllm.StoppingCriteria(max_new_tokens=12, stop_token_ids=[101])
    finish = (await inference.Generate(_asked(stopping=stopping))).outputs.finish_info
    assert (finish.WhichOneof("stop_reason"), finish.stop_token_id) == ("stop_token_id", 101)
    word = smollm2_tokenizer().token_bytes(101).decode()
    stopping = vllm.StoppingCriteria(max_new_tokens=12, stop_strings=[word])
    finish = (await inference.Generate(_asked(stopping=stopping))).outputs.finish_info
    assert finish.stop_string == word


def test_every_field_becomes_its_own() -> None:
    request = vllm.GenerateRequest(
        model="m",
        token_ids=vllm.TokenIds(ids=[1, 2]),
        priority=-3,
        session_id="s",
        truncate_prompt_tokens=5,
        sampling=vllm.RandomSampling(num_sequences=3, top_k=4, top_p=0.5, min_p=0.25, seed=-1),
        decoding=vllm.DecodingParameters(
            presence_penalty=0.5,
            frequency_penalty=0.25,
            repetition_penalty=1.5,
            logit_bias={3: 2.0},
            allowed_token_ids=[7, 8],
            regex="a+",
        ),
        stopping=vllm.StoppingCriteria(
            max_new_tokens=9,
            min_new_tokens=2,
            stop_token_ids=[4],
            stop_strings=["x"],
            include_stop_strings=True,
            ignore_eos=True,
        ),
        response=vllm.ResponseOptions(skip_special_tokens=False, output_candidates=vllm.CandidateTokens(all=True)),
        kv=vllm.KVCacheParameters(cache_salt="salt"),
        temperature=0.75,
    )
    sampling = pb.SamplingParams(
        n=3,
        top_k=4,
        top_p=0.5,
        min_p=0.25,
        seed=2**64 - 1,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=1.5,
        logit_bias={3: 2.0},
        allowed_token_ids=[7, 8],
        constraint=pb.Constraint(regex="a+"),
        max_tokens=9,
        min_tokens=2,
        stop_token_ids=[4],
        stop=["x"],
        include_stop_str_in_output=True,
        ignore_eos=True,
        skip_special_tokens=False,
        logprobs=2**32 - 1,
        temperature=0.75,
    )
    expected = pb.GenerateRequest(
        request_id="r",
        model="m",
        token_ids=pb.TokenIds(ids=[1, 2]),
        priority=-3,
        session_key="s",
        truncate_prompt_tokens=5,
        cache_salt="salt",
        sampling=sampling,
    )
    assert generate_request(request, "r", pb.SamplingParams()) == expected


def test_unset_fields_have_vllms_defaults() -> None:
    message = generate_request(vllm.GenerateRequest(text="a"), "r", pb.SamplingParams())
    assert (message.sampling.max_tokens, message.sampling.temperature) == (20, 0)
    assert message.sampling.HasField("temperature")
    assert not message.sampling.HasField("top_p")
    own = generate_request(vllm.GenerateRequest(text="a"), "r", pb.SamplingParams(temperature=0.7))
    assert not own.sampling.HasField("temperature"), "the model's own default is not used"
    salts = {
        generate_request(
            vllm.GenerateRequest(kv=vllm.KVCacheParameters(bypass_prefix_cache=True)), "r", pb.SamplingParams()
        ).cache_salt
        for _ in range(2)
    }
    assert len(salts - {""}) == 2, "two requests that bypass the prefix cache would share blocks"


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"media": [vllm.MediaItem()]}, "media"),
        ({"lora_name": "x"}, "lora_name"),
        ({"kv": {"kv_transfer_params": {}}}, r"kv\.kv_transfer_params"),
        ({"kv": {"ec_transfer_params": {}}}, r"kv\.ec_transfer_params"),
        ({"sampling": {"top_k": 2**31}}, r"sampling\.top_k"),
        ({"decoding": {"json_object": False}}, r"decoding\.json_object"),
    ],
)
def test_what_is_not_there_is_refused_by_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidRequest, match=name):
        generate_request(vllm.GenerateRequest(**fields), "r", pb.SamplingParams())


async def test_errors_have_the_right_statuses(inference: Any, scheduler: FakeScheduler) -> None:
    assert (await _refusal(inference.GenerateStream(vllm.GenerateRequest())))[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert (await _refusal(inference.Generate(_asked(model="other"))))[0] is grpc.StatusCode.NOT_FOUND
    scheduler.pause_at = 2
    slow = inference.GenerateStream(_asked(), timeout=0.3)
    assert (await _refusal(slow))[0] is grpc.StatusCode.DEADLINE_EXCEEDED
    scheduler.is_broken, scheduler.pause_at = True, None
    assert (await _refusal(inference.GenerateStream(_asked())))[0] is grpc.StatusCode.INTERNAL


async def test_abort_ends_requests_by_their_ids(inference: Any, control: Any, scheduler: FakeScheduler) -> None:
    scheduler.pause_at = 2
    calls = [inference.GenerateStream(_asked(request_id=request_id)) for request_id in ("a", "b")]
    ended = [asyncio.create_task(_refusal(call)) for call in calls]
    await scheduler.wait_until(lambda each: each.num_live == 2)
    await control.Abort(vllm.AbortRequest(request_ids=["a", "unknown", "b"]))
    assert [(await each)[0] for each in ended] == [grpc.StatusCode.CANCELLED] * 2


async def test_control_describes_the_cluster_as_one_engine(control: Any, router: tuple[RouterServer, Any]) -> None:
    info = await control.GetServerInfo(vllm.GetServerInfoRequest())
    assert (info.max_model_len, info.kv_block_size, info.total_kv_blocks) == (2048, 16, 1000)
    assert info.parallelism.data_parallel_size == 1
    assert info.engine_version.startswith("octavo-")
    model = await control.GetModelInfo(vllm.GetModelInfoRequest())
    assert (model.served_model_name, model.supports_text_input, model.supports_lora) == ("test-model", True, False)
    assert not (await control.IsSleeping(vllm.IsSleepingRequest())).sleeping
    await control.ListLoras(vllm.ListLorasRequest())
    assert not (await control.GetKvEventSources(vllm.GetKvEventSourcesRequest())).sources


async def test_calls_that_do_nothing_say_why(control: Any) -> None:
    unread = [
        method.name
        for method in vllm.DESCRIPTOR.services_by_name["Control"].methods
        if method.input_type is vllm.Unread.DESCRIPTOR
    ]
    assert len(unread) == 12
    for name in unread:
        code, message = await _refusal(getattr(control, name)(vllm.Unread()))
        assert code is grpc.StatusCode.UNIMPLEMENTED
        assert message.startswith(f"{name} is not supported: ")


async def test_health_names_the_services_and_smgs_is_there_for_one_more_release(
    channel: grpc.aio.Channel, router: tuple[RouterServer, Any]
) -> None:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    for name in ("vllm.Inference", "vllm.Control", "vllm.grpc.engine.VllmEngine"):
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
