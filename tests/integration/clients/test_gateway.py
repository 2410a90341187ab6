"""The router's HTTP API, called by OpenAI's client; a fake scheduler computes."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from protos import inference_pb2 as pb
from router.api.gateway.app import Gateway
from router.api.gateway.server import GatewayServer
from router.errors import AddressError
from router.server import RouterServer
from tests.fakes.routers import receive, running_router, running_schedulers, smollm2_tokenizer, socket_address
from tests.fakes.scheduler import FakeScheduler

HOST = "127.0.0.1"


@pytest.fixture
async def scheduler(tmp_path: Path) -> AsyncIterator[FakeScheduler]:
    fake = FakeScheduler(socket_address(tmp_path, "one"))
    async with running_schedulers(fake):
        yield fake


@pytest.fixture
async def router(scheduler: FakeScheduler) -> AsyncIterator[tuple[RouterServer, Any]]:
    async with running_router([scheduler.address]) as (server, stub):
        await server.wait_ready()
        yield server, stub


@pytest.fixture
async def url(router: tuple[RouterServer, Any]) -> AsyncIterator[str]:
    server, _ = router
    gateway = Gateway(server.intake, server.metrics.registry, server.readiness, max_body_bytes=100_000)
    http = GatewayServer(gateway, HOST, 0)
    http.start()
    yield f"http://{HOST}:{http.port}"
    await http.stop()


@pytest.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def http(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url) as client:
        yield client


# --- The same output as over gRPC


async def test_a_completion_streamed_and_whole_is_what_grpc_gives(
    client: openai.AsyncOpenAI, router: tuple[RouterServer, Any]
) -> None:
    _, stub = router
    sampling = pb.SamplingParams(max_tokens=12, seed=7, n=2)
    expected = await receive(stub.Generate(pb.GenerateRequest(prompt="Once upon", sampling=sampling)))
    asked: dict[str, Any] = {"model": "test-model", "prompt": "Once upon", "max_tokens": 12, "seed": 7, "n": 2}
    whole = await client.completions.create(**asked)
    assert {choice.index: choice.text for choice in whole.choices} == expected.text
    assert {choice.finish_reason for choice in whole.choices} == {"length"}
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(expected.started.prompt_token_ids), 24)

    text, last = {0: "", 1: ""}, None
    async for piece in await client.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        last = piece
        for choice in piece.choices:
            text[choice.index] += choice.text
    assert text == expected.text
    assert last is not None
    assert last.usage == whole.usage


async def test_a_chat_streamed_and_whole_is_what_grpc_gives(
    client: openai.AsyncOpenAI, router: tuple[RouterServer, Any]
) -> None:
    _, stub = router
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="Hi there")])
    request = pb.GenerateRequest(chat=chat, sampling=pb.SamplingParams(max_tokens=9, seed=3))
    expected = await receive(stub.Generate(request))
    content = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]
    asked: dict[str, Any] = {
        "model": "",
        "messages": [{"role": "user", "content": content}],
        "max_completion_tokens": 9,
        "seed": 3,
    }
    whole = await client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == expected.text[0]
    assert (whole.choices[0].message.role, whole.choices[0].finish_reason) == ("assistant", "length")
    deltas = [piece.choices[0] async for piece in await client.chat.completions.create(**asked, stream=True)]
    assert "".join(each.delta.content or "" for each in deltas) == expected.text[0]
    assert [each.delta.role for each in deltas][:2] == ["assistant", None]
    assert [each.finish_reason for each in deltas[-2:]] == [None, "length"]


async def test_several_prompts_are_several_streams_of_one_answer(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "", "max_tokens": 6, "seed": 1}
    alone = [await client.completions.create(prompt=prompt, **asked) for prompt in ([5, 6, 7], [8, 9])]
    both = await client.completions.create(prompt=[[5, 6, 7], [8, 9]], **asked)
    assert [choice.text for choice in both.choices] == [each.choices[0].text for each in alone]
    assert [choice.index for choice in both.choices] == [0, 1]
    assert both.usage is not None
    assert both.usage.completion_tokens == 12


async def test_logprobs_in_both_shapes(client: openai.AsyncOpenAI) -> None:
    chat = await client.chat.completions.create(
        model="", messages=[{"role": "user", "content": "x"}], max_tokens=3, seed=1, logprobs=True, top_logprobs=2
    )
    assert chat.choices[0].logprobs is not None
    content = chat.choices[0].logprobs.content
    assert content is not None
    assert [len(each.top_logprobs) for each in content] == [1, 1, 1]
    assert b"".join(bytes(each.bytes or []) for each in content).decode() == chat.choices[0].message.content
    text = await client.completions.create(model="", prompt="x", max_tokens=3, seed=1, logprobs=2, echo=False)
    logprobs = text.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == text.choices[0].text
    assert logprobs.text_offset == [0, *(len("".join((logprobs.tokens or [])[:i])) for i in (1, 2))]
    assert [len(each) for each in logprobs.top_logprobs or []] == [1, 1, 1]


async def test_an_echo_comes_first_and_tools_reach_the_template(
    client: openai.AsyncOpenAI, scheduler: FakeScheduler
) -> None:
    echoed = await client.completions.create(model="", prompt="Once upon", max_tokens=2, echo=True)
    assert echoed.choices[0].text.startswith("Once upon")
    # Keys are not in alphabetical order, and no double can hold one of the numbers.
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {"zoo": 2**53 + 1, "ant": 1.0}}}
    messages: Any = [{"role": "user", "content": "x"}]
    await client.chat.completions.create(model="", messages=messages, max_tokens=1, tools=[tool])
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="x")])
    chat.template_arguments_json = json.dumps({"tools": [tool]})
    assert scheduler.prompts[2] == smollm2_tokenizer().encode_chat(chat)


async def test_a_conversation_goes_on_with_the_messages_that_came_and_null_is_nothing(
    client: openai.AsyncOpenAI, http: httpx.AsyncClient
) -> None:
    messages: Any = [{"role": "user", "content": "x"}]
    first = await client.chat.completions.create(model="", messages=messages, max_tokens=2)
    said = first.choices[0].message
    # Sent back as the object that came, and as a dict with all fields of its class.
    again: Any
    for again in (said, said.model_dump()):
        answer = await client.chat.completions.create(
            model="", messages=[*messages, again, *messages], max_tokens=2, n=None, stop=None, logit_bias=None
        )
        assert answer.choices[0].finish_reason == "length"
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"of": 3}'}}
    called: Any = [
        {**said.model_dump(), "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "17"},
    ]
    answer = await client.chat.completions.create(model="", messages=[*messages, *called], max_tokens=2)
    assert answer.choices[0].finish_reason == "length"
    nothing = dict.fromkeys(("n", "stream", "echo", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs"))
    body = {**nothing, "prompt": "x", "max_tokens": 1, "stream_options": {"include_usage": None}, "unknown": None}
    assert (await http.post("/v1/completions", json=body)).status_code == 200


async def test_every_way_to_sample_reaches_the_scheduler(http: httpx.AsyncClient, scheduler: FakeScheduler) -> None:
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "min_tokens": 1,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "ignore_eos": True,
        "max_tokens": 2,
        "seed": 2**63 - 1,
        "skip_special_tokens": False,
    }
    body = {
        **given,
        "prompt": "x",
        "logit_bias": {"7": -1.5},
        "stop_token_ids": [9],
        "stop": "END",
        "priority": -3,
        "cache_salt": "salt",
        "session_key": "s",
        "user": "nobody",
    }
    answer = await http.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["id"] == "cmpl-mine"
    submitted = scheduler.submitted[0]
    assert {name: getattr(submitted.sampling, name) for name in given if name != "skip_special_tokens"} == {
        name: pytest.approx(value) for name, value in given.items() if name != "skip_special_tokens"
    }
    assert dict(submitted.sampling.logit_bias) == {7: -1.5}
    assert list(submitted.sampling.stop_token_ids) == [9]
    assert (submitted.priority, submitted.cache_salt) == (-3, "salt")


# --- Errors


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "message"),
    [
        ("completions", {}, 400, "prompt", "Field required"),
        ("completions", {"prompt": []}, 400, "prompt", "prompt is empty"),
        ("completions", {"prompt": "x", "temperature": -1}, 400, "temperature", "temperature=-1: use a number in"),
        ("completions", {"prompt": "x", "n": 65}, 400, "n", "use 1 to 64"),
        ("completions", {"prompt": "x", "max_tokens": -1}, 400, "max_tokens", "greater than or equal to 0"),
        ("completions", {"prompt": [1, -2]}, 400, "prompt", "-2 is not from 0"),
        ("completions", {"prompt": "x", "model": "gpt-9"}, 404, None, "'gpt-9' is not served here"),
        ("completions", {"prompt": [5] * 2048, "echo": True}, 400, None, "the prompt has 2048 tokens"),
        ("completions", {"prompt": "x", "n": 3, "best_of": 2}, 400, "best_of", "use at least n, which is 3"),
        ("completions", {"prompt": "x", "best_of": 3, "stream": True}, 400, "best_of", "known at the end"),
        ("completions", {"prompt": "x", "prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs", "whole answer"),
        ("completions", {"prompt": "x", "prompt_logprobs": 21}, 400, "prompt_logprobs", "use 0 to 20"),
        (
            "completions",
            {"prompt": "x", "truncate_prompt_tokens": 0},
            400,
            "truncate_prompt_tokens",
            "at least 1, or -1",
        ),
        ("completions", {"prompt": "x", "truncation_side": "up"}, 400, "truncation_side", "'left' or 'right'"),
        ("completions", {"prompt": "x", "stream_interval": 0}, 400, "stream_interval", "greater than or equal to 1"),
        ("completions", {"prompt": "x", "request_id": "a b"}, 400, "request_id", "of [A-Za-z0-9._:-]"),
        ("completions", {"prompt": "x", "use_beam_search": True, "stream": True}, 400, "stream", "known at the end"),
        ("completions", {"prompt": "x", "use_beam_search": True, "n": 33}, 400, "n", "use 1 to 32"),
        ("completions", {"prompt": "x", "use_beam_search": True, "stop": "b"}, 400, "stop", "use stop_token_ids"),
        (
            "completions",
            {"prompt": "x", "use_beam_search": True, "length_penalty": 11},
            400,
            "length_penalty",
            "[-10, 10]",
        ),
        ("completions", {"prompt": "x", "use_beam_search": True, "logit_bias": {"5": 1}}, 400, "logit_bias", "unset"),
        (
            "completions",
            {"prompt": "x", "use_beam_search": True, "frequency_penalty": 1},
            400,
            "frequency_penalty",
            "unset",
        ),
        (
            "completions",
            {"prompt": "x", "use_beam_search": True, "prompt_logprobs": 1},
            400,
            "prompt_logprobs",
            "unset",
        ),
        (
            "completions",
            {"prompt": "x", "use_beam_search": True, "echo": True, "logprobs": 1},
            400,
            "echo",
            "leave one",
        ),
        ("chat/completions", {"messages": [], "use_beam_search": "x"}, 400, "use_beam_search", "boolean"),
        ("completions", {"prompt": "x", "suffix": "end"}, 400, "suffix", "no tokens for filling"),
        ("chat/completions", {"messages": []}, 400, "messages", "messages is empty"),
        ("chat/completions", {"messages": [{"role": "user"}]}, 400, "messages", "messages.0: it has no content"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages", ""),
        (
            "chat/completions",
            {
                "messages": [{"role": "user", "content": "x"}],
                "continue_final_message": True,
                "add_generation_prompt": True,
            },
            400,
            "continue_final_message",
            "use one of them",
        ),
        ("chat/completions", {"messages": [], "tool_choice": "required"}, 400, "tool_choice", "there are no tools"),
        ("chat/completions", {"messages": [], "top_logprobs": 3}, 400, "top_logprobs", "needs logprobs=true"),
        ("chat/completions", {"messages": [], "response_format": {"type": "x"}}, 400, "response_format", "use text"),
    ],
)
async def test_bad_input_is_refused_in_openais_shape(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], status: int, param: str | None, message: str
) -> None:
    answer = await http.post(f"/v1/{path}", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"


async def test_a_body_that_is_no_json_or_too_large_and_a_page_that_is_not_there(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", content=b"{")
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    answer = await http.post("/v1/completions", content=b"x" * 100_001)
    assert answer.status_code == 413
    assert "max_message_bytes=100000" in answer.json()["error"]["message"]
    missing = (await http.get("/v1/nothing")).json()["error"]
    # Clients tell a wrong model from a wrong path by the code.
    assert (missing["message"], missing["code"]) == ("GET /v1/nothing: Not Found", None)
    wrong = {"model": "x", "prompt": "y"}
    for answer in (await http.get("/v1/models/x"), await http.post("/v1/completions", json=wrong)):
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert (await http.post("/v1/embeddings", json={})).json()["error"]["code"] is None
    assert (await http.get("/v1/completions")).status_code == 405


async def test_openais_client_raises_its_own_errors(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        await client.completions.create(model="other", prompt="x", stream=True)
    with pytest.raises(openai.BadRequestError, match=r"top_p=2: use a number in"):
        await client.completions.create(model="", prompt="x", top_p=2)


async def test_a_stream_without_a_replica_ends_with_an_error_once_the_router_drains(
    http: httpx.AsyncClient, scheduler: FakeScheduler, router: tuple[RouterServer, Any]
) -> None:
    async with http.stream(
        "POST", "/v1/completions", json={"prompt": "x", "max_tokens": 100_0, "stream": True}
    ) as answer:
        lines = answer.aiter_lines()
        assert (await anext(lines)).startswith("data: ")
        await scheduler.kill()
        await router[0].drain()
        last = [line async for line in lines if line.startswith("data: ")][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"


async def test_events_end_with_an_empty_line_in_the_form_that_loaders_split_by(http: httpx.AsyncClient) -> None:
    """`vllm bench serve` splits at two newlines: of events that arrive together it would lose all, were they CR LF."""
    whole = (await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3, "stream": True})).content
    assert b"\r" not in whole
    assert whole.endswith(b"\n\ndata: [DONE]\n\n")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_ends_its_request(
    url: str, router: tuple[RouterServer, Any], stream: bool
) -> None:
    server, _ = router
    async with httpx.AsyncClient(base_url=url) as http:
        body = {"prompt": "x", "max_tokens": 1000, "stream": stream, "ignore_eos": True}
        call = asyncio.create_task(http.post("/v1/completions", json=body))
        while not server.num_streams:  # noqa: ASYNC110 - it has no event for that
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    async with asyncio.timeout(20):
        await server.streams.wait_empty()


# --- The rest


async def test_models_health_and_metrics(client: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    assert [model.id async for model in client.models.list()] == ["test-model"]
    assert (await client.models.retrieve("test-model")).owned_by == "octavo"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")
    assert (await http.get("/health")).status_code == 200
    assert "octavo_replica_ready" in (await http.get("/metrics")).text


async def test_without_a_replica_the_answer_is_503(tmp_path: Path) -> None:
    async with running_router([socket_address(tmp_path, "nobody")]) as (server, _):
        gateway = Gateway(server.intake, server.metrics.registry, server.readiness, max_body_bytes=1000)
        http_server = GatewayServer(gateway, HOST, 0)
        http_server.start()
        async with httpx.AsyncClient(base_url=f"http://{HOST}:{http_server.port}") as http:
            for answer in (await http.post("/v1/completions", json={"prompt": "x"}), await http.get("/v1/models")):
                assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
                assert answer.json()["error"]["type"] == "server_error"
            assert (await http.get("/health")).status_code == 503
        with pytest.raises(AddressError, match="http_port="):
            GatewayServer(gateway, HOST, http_server.port)
        await http_server.stop()


async def test_a_client_that_never_reads_gives_its_place_back(
    scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.streams.outbox.UNREAD_S", 0.2)
    scheduler.model.max_model_len = 200_000
    scheduler.tokens_per_step = 64
    body = json.dumps({"prompt": "x", "max_tokens": 150_000, "stream": True, "ignore_eos": True, "logprobs": 1})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    async with running_router([scheduler.address], stream_buffer_bytes=65_536) as (server, _):
        await server.wait_ready()
        gateway = Gateway(server.intake, server.metrics.registry, server.readiness, max_body_bytes=1000)
        http = GatewayServer(gateway, HOST, 0)
        # Connections inherit the buffer size from the listening socket: megabytes by default.
        http._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        http.start()
        async with httpx.AsyncClient(base_url=f"http://{HOST}:{http.port}") as another:
            assert (await another.get("/health")).status_code == 200
        with socket.socket() as narrow:
            narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            narrow.connect((HOST, http.port))
            _, client = await asyncio.open_connection(sock=narrow.dup(), limit=1024)
        client.write((head + body).encode())
        await scheduler.wait_until(lambda fake: fake.num_live == 1)
        async with asyncio.timeout(20):
            await server.streams.wait_empty()
        client.close()
        await client.wait_closed()
        await http.stop()
