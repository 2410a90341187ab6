"""inference.GRPCInferenceService on the router, with tensors of Triton's vLLM backend; a fake scheduler computes."""

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos import inference_pb2 as pb
from router.compat.protos import kserve_pb2 as kserve
from router.compat.protos.kserve_pb2_grpc import GRPCInferenceServiceStub
from router.server import RouterServer
from tests.fakes.routers import receive, running_router, running_schedulers, socket_address
from tests.fakes.scheduler import FakeScheduler

SERVICE = "inference.GRPCInferenceService"


@pytest.fixture
async def scheduler(tmp_path: Path) -> AsyncIterator[FakeScheduler]:
    fake = FakeScheduler(socket_address(tmp_path, "one"))
    async with running_schedulers(fake):
        yield fake


@pytest.fixture
async def router(scheduler: FakeScheduler) -> AsyncIterator[tuple[RouterServer, Any]]:
    async with running_router([scheduler.address], compat="kserve") as (server, stub):
        await server.wait_ready()
        yield server, stub


@pytest.fixture
async def channel(router: tuple[RouterServer, Any]) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{router[0].port}") as channel:
        yield channel


@pytest.fixture
async def triton(channel: grpc.aio.Channel) -> Any:
    # The generated stub's types are those of the synchronous one.
    return GRPCInferenceServiceStub(channel)


def _request(
    raw: bool = False, stream: bool | None = None, excludes_input: bool | None = None, **parameters: object
) -> kserve.ModelInferRequest:
    request = kserve.ModelInferRequest(model_name="test-model", id="7")
    texts = {"text_input": "Once upon", "sampling_parameters": json.dumps({"max_tokens": 8, "seed": 5} | parameters)}
    for name, text in texts.items():
        tensor = request.inputs.add(name=name, datatype="BYTES", shape=[1])
        if raw:
            request.raw_input_contents.append(len(text).to_bytes(4, "little") + text.encode())
        else:
            tensor.contents.bytes_contents.append(text.encode())
    for name, flag in (("stream", stream), ("exclude_input_in_output", excludes_input)):
        if flag is not None:
            tensor = request.inputs.add(name=name, datatype="BOOL", shape=[1])
            if raw:
                request.raw_input_contents.append(bytes([flag]))
            else:
                tensor.contents.bool_contents.append(flag)
    return request


async def _expected(stub: Any, **sampling: Any) -> dict[int, str]:
    given: dict[str, Any] = {"max_tokens": 8, "seed": 5} | sampling
    request = pb.GenerateRequest(prompt="Once upon", sampling=pb.SamplingParams(**given))
    return (await receive(stub.Generate(request))).text


def _texts(response: kserve.ModelInferResponse) -> list[str]:
    [output] = response.outputs
    assert (output.name, output.datatype) == ("text_output", "BYTES")
    if not response.raw_output_contents:
        return [each.decode() for each in output.contents.bytes_contents]
    [data] = response.raw_output_contents
    texts = []
    while data:
        length = int.from_bytes(data[:4], "little")
        texts.append(data[4 : 4 + length].decode())
        data = data[4 + length :]
    assert list(output.shape) == [len(texts)]
    return texts


@pytest.mark.parametrize("raw", [True, False])
async def test_whole_with_and_without_the_input_is_what_our_own_call_gives(
    router: tuple[RouterServer, Any], triton: Any, raw: bool
) -> None:
    expected = await _expected(router[1], n=2)
    answer = await triton.ModelInfer(_request(raw, excludes_input=True, n=2))
    assert _texts(answer) == [expected[0], expected[1]]
    assert bool(answer.raw_output_contents) is raw
    assert (answer.id, answer.model_name, answer.model_version) == ("7", "test-model", "1")
    assert _texts(await triton.ModelInfer(_request(raw))) == ["Once upon" + expected[0]]


@pytest.mark.parametrize("raw", [True, False])
async def test_streamed_pieces_add_up_and_the_last_says_so(
    router: tuple[RouterServer, Any], triton: Any, raw: bool
) -> None:
    expected = await _expected(router[1])
    pieces, finals = [], []
    # Numbers as text, as in Triton's examples.
    async for answer in triton.ModelStreamInfer(iter([_request(raw, stream=True, max_tokens="8")])):
        assert not answer.error_message
        pieces += _texts(answer.infer_response)
        finals.append(answer.infer_response.parameters["triton_final_response"].bool_param)
    assert "".join(pieces) == expected[0]
    assert finals == [False] * (len(finals) - 1) + [True]


async def test_a_stream_that_could_not_be_computed_has_no_last_piece(triton: Any, scheduler: FakeScheduler) -> None:
    def next_token(token_ids: Sequence[int], num_prompt_tokens: int, seed: int, choice: int) -> int:
        scheduler.is_broken = len(token_ids) - num_prompt_tokens == 3
        return 5000

    scheduler.next_token = next_token
    *pieces, last = [answer async for answer in triton.ModelStreamInfer(iter([_request(stream=True)]))]
    assert pieces
    assert not any(each.infer_response.parameters["triton_final_response"].bool_param for each in pieces)
    assert last.error_message.startswith("INTERNAL")


async def test_one_call_carries_many_requests_and_one_that_fails_does_not_end_it(triton: Any) -> None:
    requests = [
        _request(stream=True),
        _request(stream=True, temperature=-1),
        _request(stream=False, excludes_input=True),
    ]
    for number, request in enumerate(requests):
        request.id = str(number)
    texts: dict[str, str] = {}
    errors: dict[str, str] = {}
    async for answer in triton.ModelStreamInfer(iter(requests)):
        number = answer.infer_response.id
        if answer.error_message:
            errors[number] = answer.error_message
        else:
            texts[number] = texts.get(number, "") + _texts(answer.infer_response)[0]
    assert texts["0"] == texts["2"] != ""
    assert list(errors) == ["1"]
    assert errors["1"].startswith("INVALID_ARGUMENT: sampling.temperature=-1: use a number")


async def test_a_message_of_too_many_elements_ends_the_call_but_not_the_requests_before_it(triton: Any) -> None:
    call = triton.ModelStreamInfer()
    await call.write(_request(stream=True))
    bomb = _request()
    bomb.inputs[0].shape.extend([1] * 2_000)
    await call.write(bomb)
    pieces = []
    async for answer in call:
        pieces.append(answer)
        if answer.infer_response.parameters["triton_final_response"].bool_param:
            break
    with pytest.raises(grpc.aio.AioRpcError, match=r"inputs\.shape has 2002 entries: use at most 1024") as error:
        await anext(aiter(call))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert pieces[-1].infer_response.parameters["triton_final_response"].bool_param


async def test_messages_of_a_call_share_a_budget_until_they_are_accepted(scheduler: FakeScheduler) -> None:
    large = _request(stream=True)
    large.parameters["unused"].string_param = "x" * 2**19
    running = running_router([scheduler.address], compat="kserve", max_bodies_bytes=2**21, max_message_bytes=2**20)
    async with running as (server, _):
        await server.wait_ready()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            # Four times as much as a router may hold: each is read when the one before it has been accepted.
            call: Any = GRPCInferenceServiceStub(channel).ModelStreamInfer(iter([large] * 16))
            answers = [answer async for answer in call]
    assert not [answer.error_message for answer in answers if answer.error_message]
    assert sum(answer.infer_response.parameters["triton_final_response"].bool_param for answer in answers) == 16


async def test_a_client_that_goes_away_ends_its_requests(triton: Any, scheduler: FakeScheduler) -> None:
    scheduler.pause_at = 2
    call = triton.ModelStreamInfer()
    for _ in range(3):
        await call.write(_request(stream=True))
    await scheduler.wait_until(lambda fake: fake.num_live == 3)
    call.cancel()
    await scheduler.wait_until(lambda fake: fake.num_live == 0)


def _with(**fields: Any) -> kserve.ModelInferRequest:
    request = _request()
    for name, value in fields.items():
        setattr(request.inputs[0], name, value)
    return request


def _raw(contents: bytes) -> kserve.ModelInferRequest:
    request = _request(raw=True)
    request.raw_input_contents[0] = contents
    return request


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (kserve.ModelInferRequest(), "the input text_input is missing"),
        (_with(name="prompt"), "'prompt': use text_input, stream"),
        (_with(datatype="FP32"), "input text_input: datatype='FP32': use BYTES"),
        (_with(name="sampling_parameters"), "sampling_parameters comes twice"),
        (_raw(b"\xff\xff\xff\xffx"), "text_input has 5 raw bytes"),
        (_raw(b""), "text_input has 0 raw bytes"),
        (_raw(b"\1\0\0\0\xff"), "text_input is not UTF-8 at byte 0"),
        (_request(stream=True), "stream=true: call ModelStreamInfer"),
        (_request(max_tokns=3), "sampling_parameters: max_tokns: there is no such field"),
        (_request(prompt="x"), "sampling_parameters: prompt is not a sampling parameter"),
        (_request(stop=["x" * 70_000]), "sampling_parameters has 70[0-9]+ bytes: use at most 65536"),
        (_request(stop=[[]] * 12_000), "sampling_parameters has more than 16000 values"),
        (_request(max_tokens=0), "max_tokens=0: use at least 1"),
        (_request(top_p=2), "sampling.top_p=2: use a number"),
        (kserve.ModelInferRequest(model_version="2"), "model_version='2': use '1'"),
        (kserve.ModelInferRequest(outputs=[{"name": "logits"}]), "'logits' is unknown: use text_output"),
        (kserve.ModelInferRequest(inputs=[{}], raw_input_contents=[b"", b""]), "raw_input_contents has 2 entries"),
        (kserve.ModelInferRequest(inputs=[{"name": "stream", "datatype": "BOOL", "shape": [2]}]), r"shape=\[2\]"),
    ],
)
async def test_bad_input_is_refused_by_name(triton: Any, request_: kserve.ModelInferRequest, message: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=message) as error:
        await triton.ModelInfer(request_)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_what_a_stream_can_not_do_is_said_in_it(triton: Any) -> None:
    refused = [_request(stream=True, n=2), _request(stream=True, excludes_input=False)]
    messages = {answer.error_message async for answer in triton.ModelStreamInfer(iter(refused))}
    assert any("n=2 with stream=true" in message for message in messages)
    assert any("exclude_input_in_output=false" in message for message in messages)


async def test_metadata_readiness_and_another_model(
    triton: Any, channel: grpc.aio.Channel, scheduler: FakeScheduler
) -> None:
    assert (await triton.ServerLive(kserve.ServerLiveRequest())).live
    assert (await triton.ServerReady(kserve.ServerReadyRequest())).ready
    assert (await triton.ServerMetadata(kserve.ServerMetadataRequest())).name == "octavo"
    assert (await triton.ModelReady(kserve.ModelReadyRequest(name="test-model", version="1"))).ready
    assert not (await triton.ModelReady(kserve.ModelReadyRequest(name="other"))).ready
    metadata = await triton.ModelMetadata(kserve.ModelMetadataRequest(name="test-model"))
    assert [(each.name, each.datatype) for each in metadata.outputs] == [("text_output", "BYTES")]
    assert {each.name for each in metadata.inputs} >= {"text_input", "stream", "sampling_parameters"}
    with pytest.raises(grpc.aio.AioRpcError, match="not served here"):
        await triton.ModelInfer(kserve.ModelInferRequest(model_name="other", inputs=_request().inputs))

    health: Any = health_pb2_grpc.HealthStub(channel)  # type: ignore[arg-type]
    watched = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
    assert (await watched.read()).status == health_pb2.HealthCheckResponse.SERVING
    scheduler.workers_ready = False
    scheduler.send_load()
    assert (await watched.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert not (await triton.ServerReady(kserve.ServerReadyRequest())).ready
    assert not (await triton.ModelReady(kserve.ModelReadyRequest(name="test-model"))).ready


async def test_reflection_shows_it(channel: grpc.aio.Channel) -> None:
    reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]
    call = reflection.ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    listed = {service.name for service in (await call.read()).list_services_response.service}
    assert {SERVICE, "octavo.v1.Inference"} <= listed
    call.cancel()
