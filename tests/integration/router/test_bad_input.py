"""Bad input: the right status, and a message that names field, value and what would work. Others are not affected."""

import math
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest

from protos import inference_pb2 as pb
from protos.inference_pb2_grpc import InferenceStub
from tests.fakes.routers import receive, running_router, running_schedulers, socket_address
from tests.fakes.scheduler import VOCAB_SIZE, FakeScheduler, model_info

MAX_LEN = 64


@pytest.fixture(scope="module", name="directory")
def _directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bad")


@pytest.fixture
async def client(directory: Path) -> AsyncIterator[InferenceStub]:
    fake = FakeScheduler(socket_address(directory, "one"), model=model_info(max_model_len=MAX_LEN))
    async with running_schedulers(fake), running_router([fake.address]) as (server, stub):
        await server.wait_ready()
        yield stub
        # After any refusal a good request still works, and nothing is left behind.
        received = await receive(stub.Generate(_with(max_tokens=2)))
        assert received.finished is not None
        assert fake.num_live == 0


def _with(**sampling: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt="Hello there", sampling=pb.SamplingParams(**sampling))  # type: ignore[arg-type]


def _resume(**fields: object) -> pb.GenerateRequest:
    merged: dict = {"attempt": 1, "prompt_token_ids": [5, 6], "fingerprint": "one", **fields}
    sampling = pb.SamplingParams(seed=1, max_tokens=4, n=2)
    return pb.GenerateRequest(sampling=sampling, resume=pb.Resume(**merged))


def _choice(**fields: object) -> pb.ResumeChoice:
    return pb.ResumeChoice(**fields)  # type: ignore[arg-type]


def _ids(*token_ids: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=token_ids))


INVALID = {
    "no input": (pb.GenerateRequest(), "set one of prompt, chat and token_ids"),
    "empty prompt": (pb.GenerateRequest(prompt=""), "prompt is empty"),
    "empty ids": (_ids(), "token_ids.ids is empty"),
    "empty chat": (pb.GenerateRequest(chat=pb.ChatPrompt()), "chat.messages is empty"),
    "no role": (pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(content="x")])), r"messages\[0\].role"),
    "long prompt": (_ids(*[5] * MAX_LEN), f"has {MAX_LEN} tokens: use at most {MAX_LEN - 1}"),
    "long text": (pb.GenerateRequest(prompt="word " * 200), f"use at most {MAX_LEN - 1}"),
    "huge text": (pb.GenerateRequest(prompt="x" * 10_000_000), "10000000 characters"),
    "huge chat": (
        pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="x" * 10_000_000)])),
        "10000000 characters",
    ),
    "vocabulary": (_ids(5, VOCAB_SIZE), rf"token_ids.ids\[1\]={VOCAB_SIZE}: .* 0 to {VOCAB_SIZE - 1}"),
    "request id": (pb.GenerateRequest(prompt="x", request_id="a b"), "request_id='a b': use 1 to 128"),
    "long request id": (pb.GenerateRequest(prompt="x", request_id="a" * 129), "1 to 128 characters"),
    "request id with newline": (pb.GenerateRequest(prompt="x", request_id="a\n"), "request_id="),
    "session": (pb.GenerateRequest(prompt="x", session_key="s" * 257), "session_key has 257 bytes: at most 256"),
    "salt": (pb.GenerateRequest(prompt="x", cache_salt="é" * 129), "cache_salt has 258 bytes: at most 256"),
    "beyond max_model_len": (_with(max_tokens=MAX_LEN), r"max_tokens=64 after a prompt of \d+ tokens.*use at most 6\d"),
    "2^31 max_tokens": (_with(max_tokens=2**31), "max_tokens=2147483648"),
    "max_tokens 0": (_with(max_tokens=0), "max_tokens=0: use at least 1"),
    "min over max": (_with(max_tokens=3, min_tokens=4), "min_tokens=4: use at most max_tokens, which is 3"),
    "min over room": (_with(min_tokens=MAX_LEN), "min_tokens=64"),
    "negative temperature": (_with(temperature=-1), r"temperature=-1: use a number in \[0, 100\]"),
    "NaN temperature": (_with(temperature=math.nan), "temperature=nan"),
    "infinite temperature": (_with(temperature=math.inf), "temperature=inf"),
    "top_p 0": (_with(top_p=0), r"top_p=0: use a number in \(0, 1\]"),
    "top_p 2": (_with(top_p=2), "top_p=2"),
    "top_k": (_with(top_k=-2), "top_k=-2"),
    "min_p": (_with(min_p=1.5), "min_p=1.5"),
    "repetition": (_with(repetition_penalty=0), "repetition_penalty=0"),
    "presence": (_with(presence_penalty=2.5), r"presence_penalty=2.5: use a number in \[-2, 2\]"),
    "frequency": (_with(frequency_penalty=math.nan), "frequency_penalty=nan"),
    "n": (_with(n=65), "n=65: use 1 to 64"),
    "logprobs": (_with(logprobs=21), "logprobs=21: use 0 to 20"),
    "prompt_logprobs": (_with(prompt_logprobs=21), "prompt_logprobs=21"),
    "stop length": (_with(stop=["x" * 10_000]), r"stop\[0\] has 10000 characters: use 1 to 1024"),
    "stop empty": (_with(stop=[""]), r"stop\[0\] has 0 characters"),
    "stops": (_with(stop=["x"] * 17), "stop has 17 entries: use at most 16"),
    "stop ids": (_with(stop_token_ids=[1] * 65), "stop_token_ids has 65"),
    "stop id": (_with(stop_token_ids=[VOCAB_SIZE]), r"stop_token_ids\[0\]=49152"),
    "bias": (_with(logit_bias={5: 101}), r"logit_bias\[5\]=101: use a number in \[-100, 100\]"),
    "NaN bias": (_with(logit_bias={5: math.nan}), r"logit_bias\[5\]=nan"),
    "biases": (_with(logit_bias=dict.fromkeys(range(1025), 1.0)), "logit_bias has 1025"),
    "bias id": (_with(logit_bias={VOCAB_SIZE: 1}), "49152: token ids of this model"),
    "attempt 0": (_resume(attempt=0), r"resume.attempt=0: use Started.attempt \+ 1"),
    "attempt large": (_resume(attempt=70_000), "resume.attempt=70000"),
    "no resume prompt": (_resume(prompt_token_ids=[]), "give Started.prompt_token_ids"),
    "resume index": (_resume(choices=[_choice(index=2)]), r"choices\[0\].index=2: sampling.n=2 has choices 0 to 1"),
    "resume twice": (_resume(choices=[_choice(index=1), _choice(index=1)]), "index=1 comes twice"),
    "resume too long": (_resume(choices=[_choice(output_token_ids=[5] * 5)]), "has 5 tokens: sampling.max_tokens=4"),
    "resume beyond max_model_len": (
        pb.GenerateRequest(
            sampling=pb.SamplingParams(seed=1, max_tokens=10 * MAX_LEN),
            resume=pb.Resume(attempt=1, prompt_token_ids=[5], choices=[_choice(output_token_ids=[5] * 10 * MAX_LEN)]),
        ),
        "max_tokens=640 after a prompt of 1 tokens goes beyond max_model_len=64",
    ),
    "resume ids": (_resume(choices=[_choice(output_token_ids=[VOCAB_SIZE])]), r"output_token_ids\[0\]=49152"),
    "resume text": (
        _resume(choices=[_choice(output_token_ids=[500], text_bytes_delivered=99)]),
        "=99, but its 1 tokens",
    ),
}


@pytest.mark.parametrize("case", INVALID)
async def test_invalid_arguments(client: InferenceStub, case: str) -> None:
    request, message = INVALID[case]
    with pytest.raises(grpc.aio.AioRpcError, match=message) as caught:
        await receive(client.Generate(request))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_other_statuses(client: InferenceStub) -> None:
    cases = [
        (
            client.GenerateUnary(pb.GenerateRequest(prompt="x", model="gpt-9")),
            "NOT_FOUND",
            "'gpt-9' .* use 'test-model'",
        ),
        (client.GetModel(pb.GetModelRequest(model="gpt-9")), "NOT_FOUND", "test-model"),
        (client.Tokenize(pb.TokenizeRequest(model="gpt-9", prompt="x")), "NOT_FOUND", "test-model"),
        (client.Tokenize(pb.TokenizeRequest()), "INVALID_ARGUMENT", "set prompt or chat"),
        (client.Tokenize(pb.TokenizeRequest(prompt="x" * 10_000_000)), "INVALID_ARGUMENT", "10000000 characters"),
        (
            client.Tokenize(
                pb.TokenizeRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="x" * 10_000_000)]))
            ),
            "INVALID_ARGUMENT",
            "10000000 characters",
        ),
        (client.Detokenize(pb.DetokenizeRequest(model="gpt-9")), "NOT_FOUND", "test-model"),
    ]
    for call, status, message in cases:
        with pytest.raises(grpc.aio.AioRpcError, match=message) as caught:
            await call
        assert caught.value.code().name == status


async def test_text_that_is_half_a_character_can_not_have_been_delivered(client: InferenceStub) -> None:
    tokens = (await client.Tokenize(pb.TokenizeRequest(prompt="é"))).token_ids
    request = _resume(choices=[_choice(output_token_ids=tokens, text_bytes_delivered=1)])
    with pytest.raises(grpc.aio.AioRpcError, match="inside of a character"):
        await receive(client.Generate(request))


async def test_a_message_over_the_bound_is_refused(directory: Path) -> None:
    fake = FakeScheduler(socket_address(directory, "small"))
    async with running_schedulers(fake), running_router([fake.address], max_message_bytes=65_536) as (server, stub):
        await server.wait_ready()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await receive(stub.Generate(pb.GenerateRequest(prompt="x" * 100_000)))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await receive(stub.Generate(_with(max_tokens=1)))).finished is not None


async def test_before_a_replica_is_ready_requests_hear_why(directory: Path) -> None:
    async with running_router([socket_address(directory, "absent")]) as (_, stub):
        for call in (stub.GenerateUnary(_with()), stub.GetModel(pb.GetModelRequest())):
            with pytest.raises(grpc.aio.AioRpcError, match=r"absent\.sock: not connected yet \(for \d+ s\)") as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
