"""Messages that clients send to the router by gRPC: for Octavo's own service, and those of other projects."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from benchmarks.fuzz.edge import Edge
from benchmarks.fuzz.edges.cluster import CHAT, CHAT_WITH_JSON, REQUESTS, SmallCluster, small_cluster
from benchmarks.fuzz.mutation import malformed
from protos import inference_pb2 as pb
from router.api.inference_service import InferenceService
from router.compat import sglang as of_sglang
from router.compat import vllm_messages as of_vllm
from router.compat.kserve import read
from router.compat.protos import kserve_pb2 as kserve
from router.compat.protos import sglang_pb2 as sglang
from router.compat.protos import vllm_pb2 as vllm_own
from router.compat.smg import generate_request
from router.errors import RequestError
from router.intake.intake import Intake

# A client leaves after so many messages.
_MOST_READ = 3


class _Caller:
    """The gRPC side of one call, without a network."""

    def __init__(self) -> None:
        self.status = ""
        self._num_read = 0

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def time_remaining(self) -> float | None:
        return None

    async def write(self, message: Message) -> None:
        message.SerializeToString()
        self._num_read += 1
        if self._num_read >= _MOST_READ:
            raise asyncio.CancelledError

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: object = ()) -> None:
        assert code is not grpc.StatusCode.INTERNAL, f"INTERNAL: {details}"
        self.status = code.name.lower()
        raise grpc.aio.AbortError


class _Requests:
    """Requests that one method reads and the router's intake takes."""

    def __init__(self, cluster: SmallCluster, kinds: Mapping[type[Message], tuple[Message, ...]]) -> None:
        self._cluster, self._kinds = cluster, list(kinds.items())

    def malformed(self, random: Random) -> bytes:
        number = 0 if random.random() < 0.8 else random.randrange(len(self._kinds))
        return bytes([number]) + malformed(self._kinds[number][1], random)

    async def feed(self, message: bytes) -> str:
        self._cluster.tidy()
        kind = self._kinds[message[0] % len(self._kinds)][0]
        try:
            request = kind.FromString(message[1:])
        except DecodeError:
            return "no message"
        caller = _Caller()
        try:
            await self.answer(request, caller)
        except RequestError as error:
            return error.status.name.lower()
        except grpc.aio.AbortError:
            return caller.status
        except asyncio.CancelledError:
            return "streamed"
        return "answered"

    async def answer(self, request: Any, caller: _Caller) -> None:
        raise NotImplementedError

    async def check(self) -> None:
        await self._cluster.check()


class _Inference(_Requests):
    _METHODS = {  # noqa: RUF012
        pb.GenerateRequest: "Generate",
        pb.TokenizeRequest: "Tokenize",
        pb.DetokenizeRequest: "Detokenize",
        pb.GetModelRequest: "GetModel",
        pb.CancelRequest: "Cancel",
    }

    def __init__(self, cluster: SmallCluster) -> None:
        seeds: dict[type[Message], tuple[Message, ...]] = {
            pb.GenerateRequest: (*REQUESTS, CHAT, CHAT_WITH_JSON),
            pb.TokenizeRequest: (pb.TokenizeRequest(prompt="Hello"), pb.TokenizeRequest(chat=CHAT.chat)),
            pb.DetokenizeRequest: (pb.DetokenizeRequest(token_ids=[5, 600, 7], skip_special_tokens=True),),
            pb.GetModelRequest: (pb.GetModelRequest(model="test-model"),),
            pb.CancelRequest: (pb.CancelRequest(request_id="fuzzed"),),
        }
        super().__init__(cluster, seeds)
        self._service = InferenceService(cluster.router.intake, cluster.router.attachments)

    async def answer(self, request: Any, caller: _Caller) -> None:
        await getattr(self._service, self._METHODS[type(request)])(request, caller)


class _Foreign(_Requests):
    def __init__(
        self,
        cluster: SmallCluster,
        seeds: dict[type[Message], tuple[Message, ...]],
        convert: Callable[[Any], pb.GenerateRequest],
    ) -> None:
        super().__init__(cluster, seeds)
        self._intake: Intake = cluster.router.intake
        self._convert = convert

    async def answer(self, request: Any, caller: _Caller) -> None:
        async with self._intake.open(self._convert(request), None) as stream:
            while events := await stream.outbox.take():
                for event in events:
                    await caller.write(event)


@asynccontextmanager
async def inference(directory: Path) -> AsyncIterator[Edge]:
    async with small_cluster(directory) as cluster:
        yield _Inference(cluster)


@asynccontextmanager
async def kserve_edge(directory: Path) -> AsyncIterator[Edge]:
    typed = kserve.ModelInferRequest(model_name="test-model", id="1")
    raw = kserve.ModelInferRequest(model_name="test-model")
    parameters = b'{"max_tokens": "3", "stop": ["a"], "logit_bias": {"5": 1}, "seed": 7, "n": 2}'
    for name, datatype, content in (
        ("text_input", "BYTES", b"Hello there"),
        ("stream", "BOOL", b"\1"),
        ("sampling_parameters", "BYTES", parameters),
    ):
        tensor = typed.inputs.add(name=name, datatype=datatype, shape=[1])
        if datatype == "BOOL":
            tensor.contents.bool_contents.append(False)
        else:
            tensor.contents.bytes_contents.append(content)
        raw.inputs.add(name=name, datatype=datatype, shape=[1])
        sized = content if datatype == "BOOL" else len(content).to_bytes(4, "little") + content
        raw.raw_input_contents.append(sized)
    async with small_cluster(directory) as cluster:
        yield _Foreign(
            cluster, {kserve.ModelInferRequest: (typed, raw)}, lambda request: read(request, "test-model")[1]
        )


@asynccontextmanager
async def vllm_edge(directory: Path) -> AsyncIterator[Edge]:
    sampling = vllm.SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        max_tokens=3,
        n=2,
        seed=-7,
        logprobs=2,
        stop=["a"],
        stop_token_ids=[4],
        logit_bias={5: 1.0},
    )
    seeds = (
        vllm.GenerateRequest(request_id="a", text="Hello there", sampling_params=sampling, stream=True),
        vllm.GenerateRequest(request_id="b", tokenized=vllm.TokenizedInput(input_ids=[5, 6]), sampling_params=sampling),
    )
    async with small_cluster(directory) as cluster:
        yield _Foreign(
            cluster,
            {vllm.GenerateRequest: seeds},
            lambda request: generate_request(request, request.request_id or uuid.uuid4().hex),
        )


@asynccontextmanager
async def vllm_own_edge(directory: Path) -> AsyncIterator[Edge]:
    shared = {
        "sampling": vllm_own.RandomSampling(num_sequences=2, top_k=4, top_p=0.9, min_p=0.1, seed=-7),
        "decoding": vllm_own.DecodingParameters(logit_bias={5: 1.0}, presence_penalty=0.5),
        "stopping": vllm_own.StoppingCriteria(max_new_tokens=3, stop_strings=["a"], stop_token_ids=[4]),
        "response": vllm_own.ResponseOptions(output_logprobs=True, prompt_logprobs=True, output_token_ids=True),
    }
    seeds = (
        vllm_own.GenerateRequest(request_id="a", text="Hello there", temperature=0.5, **shared),
        vllm_own.GenerateRequest(request_id="b", token_ids=vllm_own.TokenIds(ids=[5, 6]), **shared),
    )

    class Fuzzed(_Foreign):
        async def answer(self, request: Any, caller: _Caller) -> None:
            replies = of_vllm.Replies(request.response)
            async with self._intake.open(self._convert(request), None) as stream:
                while events := await stream.outbox.take():
                    for event in events:
                        for reply in replies.take(event):
                            await caller.write(reply)

    async with small_cluster(directory) as cluster:
        yield Fuzzed(
            cluster,
            {vllm_own.GenerateRequest: seeds},
            lambda request: of_vllm.generate_request(
                request, request.request_id or uuid.uuid4().hex, cluster.router.intake.model.default_sampling
            ),
        )


@asynccontextmanager
async def sglang_edge(directory: Path) -> AsyncIterator[Edge]:
    sampling = sglang.SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        max_new_tokens=3,
        n=2,
        stop=["a"],
        stop_token_ids=[4],
        logit_bias={"5": 1.0},
    )
    prompt = sglang.TokenizedInput(input_ids=[5, 6])
    seeds = (
        sglang.GenerateRequest(request_id="a", tokenized=prompt, sampling_params=sampling, stream=True),
        sglang.GenerateRequest(
            tokenized=prompt, sampling_params=sampling, return_logprob=True, logprob_start_len=1, top_logprobs_num=2
        ),
    )

    class Fuzzed(_Foreign):
        async def answer(self, request: Any, caller: _Caller) -> None:
            message = self._convert(request)
            replies = of_sglang.Replies(request, message.request_id)
            async with self._intake.open(message, None) as stream:
                while events := await stream.outbox.take():
                    for event in events:
                        for reply in replies.take(event):
                            await caller.write(reply)

    async with small_cluster(directory) as cluster:
        yield Fuzzed(
            cluster,
            {sglang.GenerateRequest: seeds},
            lambda request: of_sglang.generate_request(request, request.request_id or uuid.uuid4().hex),
        )
