"""Prompts over HTTP: several of one request, batches of chats, a suffix, and templates of the client's own."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from protos import inference_pb2 as pb
from protos.inference_pb2_grpc import InferenceStub
from router.api.gateway.app import Gateway
from router.api.gateway.server import GatewayServer
from router.text.tokenizer import Tokenizer
from tests.fakes.routers import running_router, running_schedulers, smollm2_tokenizer, smollm2_with, socket_address
from tests.fakes.scheduler import FakeScheduler, model_info

HOST = "127.0.0.1"
TOKENS = smollm2_tokenizer()
USER = {"role": "user", "content": "Hi there"}
QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>")
Http = tuple[httpx.AsyncClient, InferenceStub]


@pytest.fixture
async def scheduler(tmp_path: Path) -> AsyncIterator[FakeScheduler]:
    # The vocabulary has room for more special tokens than SmolLM2's.
    fake = FakeScheduler(socket_address(tmp_path, "one"), model=model_info(vocab_size=49_200))
    async with running_schedulers(fake):
        yield fake


async def serving(scheduler: FakeScheduler, tokenizer: Tokenizer = TOKENS, **options: Any) -> AsyncIterator[Http]:
    async with running_router([scheduler.address], tokenizer=tokenizer, **options) as (server, stub):
        await server.wait_ready()
        gateway = Gateway(server.intake, server.registry, server.readiness, max_body_bytes=1_000_000)
        http_server = GatewayServer(gateway, HOST, 0)
        http_server.start()
        async with httpx.AsyncClient(base_url=f"http://{HOST}:{http_server.port}") as client:
            yield client, stub
        await http_server.stop()


@pytest.fixture
async def plain(scheduler: FakeScheduler) -> AsyncIterator[Http]:
    async for each in serving(scheduler):
        yield each


@pytest.fixture
async def filling(scheduler: FakeScheduler, tmp_path: Path) -> AsyncIterator[Http]:
    async for each in serving(scheduler, smollm2_with(tmp_path, *QWEN)):
        yield each


@pytest.fixture
async def trusting(scheduler: FakeScheduler) -> AsyncIterator[Http]:
    async for each in serving(scheduler, trust_request_chat_template=True):
        yield each


async def refusal(http: httpx.AsyncClient, path: str, **body: Any) -> tuple[str, str]:
    """Returns the field that a 400 names, and its message."""
    answer = await http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["param"], error["message"]


# --- Several prompts


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_of_one_prompt_ends_all_and_names_it(
    plain: Http, scheduler: FakeScheduler, stream: bool
) -> None:
    http, stub = plain
    scheduler.pause_at = 4
    body = {"prompt": ["a", "b", "c"], "max_tokens": 8, "ignore_eos": True, "stream": stream, "request_id": "many"}
    asked = asyncio.create_task(http.post("/v1/completions", json=body))
    await scheduler.wait_until(lambda fake: fake.num_live == 3)
    if stream:
        # Past the time within which an error can set the status.
        await asyncio.sleep(0.4)
    assert (await stub.Cancel(pb.CancelRequest(request_id="many-1"))).cancelled
    answer = await asked
    if stream:
        last = answer.text.rstrip().rpartition("data: ")[2]
        error = json.loads(last)["error"]
    else:
        assert answer.status_code == 409
        error = answer.json()["error"]
    assert error["message"].endswith("(prompt 2 of 3; the other prompts end with it)")
    await scheduler.wait_until(lambda fake: fake.num_live == 0)


async def test_a_prompt_that_cannot_be_used_is_named(plain: Http) -> None:
    _, message = await refusal(plain[0], "/v1/completions", prompt=[[5], [999_999]], max_tokens=2)
    assert message.endswith("(prompt 2 of 2; the other prompts end with it)")


# --- Batches of chats


async def test_a_batch_is_answered_as_its_chats_alone(plain: Http) -> None:
    http, _ = plain
    chats = [[USER], [{"role": "user", "content": "Bye"}, {"role": "assistant", "content": "Well"}, USER]]
    asked: dict[str, Any] = {"max_tokens": 5, "seed": 3, "logprobs": True, "return_token_ids": True, "n": 2}
    alone = [(await http.post("/v1/chat/completions", json={**asked, "messages": chat})).json() for chat in chats]
    answer = await http.post("/v1/chat/completions/batch", json={**asked, "messages": chats})
    assert answer.status_code == 200, answer.text
    whole = answer.json()
    assert (whole["object"], whole["model"]) == ("chat.completion", "test-model")
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    for index, choice in enumerate(whole["choices"]):
        own = alone[index // 2]
        assert choice["prompt_token_ids"] == own["prompt_token_ids"]
        assert choice["message"] == own["choices"][index % 2]["message"]
        assert choice["token_ids"] == own["choices"][index % 2]["token_ids"]
    assert whole["usage"]["completion_tokens"] == 20
    assert whole["usage"]["prompt_tokens"] == sum(each["usage"]["prompt_tokens"] for each in alone)

    echoed = await http.post(
        "/v1/chat/completions/batch",
        json={
            "messages": [[USER, {"role": "assistant", "content": begun}] for begun in ("It is ", "No ")],
            "continue_final_message": True,
            "add_generation_prompt": False,
            "echo": True,
            "return_prompt_text": True,
            "max_tokens": 2,
        },
    )
    first, second = echoed.json()["choices"]
    assert first["message"]["content"].startswith("It is ")
    assert second["message"]["content"].startswith("No ")
    assert second["prompt_text"].endswith("assistant\nNo ")


async def test_a_batch_that_cannot_be_is_refused(plain: Http) -> None:
    http, path = plain[0], "/v1/chat/completions/batch"
    assert await refusal(http, path, messages=[[USER]], stream=True) == (
        "stream",
        "stream=true: a batch of chats is answered whole",
    )
    assert (await refusal(http, path, messages=[USER]))[0] == "messages"
    assert (await refusal(http, path, messages=[[USER], []]))[0] == "messages"
    assert (await refusal(http, path, messages=[]))[0] == "messages"
    assert (await refusal(http, path, messages=[[USER]] * 257))[0] == "messages"
    _, message = await refusal(http, path, messages=[[USER], [{"role": "", "content": "x"}]])
    assert message.endswith("(prompt 2 of 2; the other prompts end with it)")


# --- A suffix


async def test_a_suffix_has_the_middle_filled_in(filling: Http, scheduler: FakeScheduler) -> None:
    http, stub = filling
    body = {"prompt": ["def f(", ""], "suffix": "\n    return x", "max_tokens": 3, "stop_token_ids": [7]}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"]) == 2
    begin, end, middle, pad = range(49_152, 49_156)
    prefix, suffix = TOKENS.encode("def f("), TOKENS.encode("\n    return x")
    expected = [[begin, *each, end, *suffix, middle] for each in (prefix, [])]
    assert sorted(scheduler.prompts.values()) == sorted(expected)
    request = pb.GenerateRequest(prompt="def f(", suffix="\n    return x")
    request.sampling.max_tokens = 3
    started = await anext(aiter(stub.Generate(request)))
    assert list(started.started.prompt_token_ids) == expected[0]
    # What ends a middle ends the output, also after a resume.
    assert list(started.started.sampling.stop_token_ids) == [pad]


async def test_a_suffix_that_cannot_be_used_is_refused_by_name(filling: Http) -> None:
    for fields in (
        {"prompt": [5, 6]},
        {"prompt": "a", "echo": True},
        {"prompt": "a", "truncate_prompt_tokens": 5},
        {"prompt": "a" * 300_000},
    ):
        param, message = await refusal(filling[0], "/v1/completions", suffix="x", **fields)
        assert param == "suffix" or "max_model_len" in message
    param, message = await refusal(
        filling[0], "/v1/completions", prompt="a", suffix="x", stop_token_ids=list(range(64))
    )
    assert (param, message) == ("stop_token_ids", "stop_token_ids has 65 entries: use at most 64")


async def test_without_tokens_for_it_a_suffix_is_refused(plain: Http) -> None:
    param, message = await refusal(plain[0], "/v1/completions", prompt="def f(", suffix="\n    return x")
    assert param == "suffix"
    assert "no tokens for filling in the middle" in message
    answer = await plain[0].post("/v1/completions", json={"prompt": "def f(", "suffix": "", "max_tokens": 1})
    assert answer.status_code == 200


# --- A template of the client's own

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if mood %}{{ mood }}{% endif %}"


async def test_a_trusted_client_brings_its_template(trusting: Http, scheduler: FakeScheduler) -> None:
    http, stub = trusting
    for body in (
        {"chat_template": TEMPLATE, "chat_template_kwargs": {"mood": "!"}},
        {"chat_template_kwargs": {"mood": "!", "chat_template": TEMPLATE}},
    ):
        asked = {"messages": [USER], "max_tokens": 1, **body}
        assert (await http.post("/v1/chat/completions", json=asked)).status_code == 200
    for prompt in scheduler.prompts.values():
        assert TOKENS.decode(prompt, skip_special_tokens=False) == "<user>Hi there!"
    counted = await http.post("/tokenize", json={"messages": [USER], "chat_template": TEMPLATE})
    assert counted.json()["tokens"] == TOKENS.encode("<user>Hi there")
    chat = pb.ChatPrompt(
        messages=[pb.ChatMessage(role="user", content="x")], chat_template="a{{ messages[0].content }}"
    )
    assert list((await stub.Tokenize(pb.TokenizeRequest(chat=chat))).token_ids) == TOKENS.encode("ax")

    path = "/v1/chat/completions"
    for template, words in (
        ("{% for %}", "the request's chat template does not compile"),
        ("{{ raise_exception('not you') }}", "not you"),
        ("x" * 40_000, "chat_template has 40000 characters: use at most 32768"),
    ):
        assert words in (await refusal(http, path, messages=[USER], chat_template=template))[1]
    kwargs = {"chat_template": 5}
    assert (await refusal(http, path, messages=[USER], chat_template_kwargs=kwargs))[0] == "chat_template_kwargs"


async def test_otherwise_a_template_is_refused_by_name(plain: Http) -> None:
    for path in ("/v1/chat/completions", "/tokenize"):
        for body in ({"chat_template": TEMPLATE}, {"chat_template_kwargs": {"chat_template": TEMPLATE}}):
            param, message = await refusal(plain[0], path, messages=[USER], **body)
            assert param == "chat_template"
            assert "trust_request_chat_template" in message
    empty = {"messages": [USER], "max_tokens": 1, "chat_template": ""}
    assert (await plain[0].post("/v1/chat/completions", json=empty)).status_code == 200
