"""The router's /v1/messages, called by Anthropic's client; a fake scheduler computes."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from router.api.gateway.anthropic.schemas import CountTokensRequest, MessagesRequest
from router.api.gateway.app import Gateway
from router.api.gateway.openai.fields import Effect
from router.api.gateway.reading.parsing import parse
from router.api.gateway.server import GatewayServer
from router.security.keys import Keys
from tests.fakes.routers import running_router, running_schedulers, smollm2_tokenizer, socket_address
from tests.fakes.scheduler import FakeScheduler, scripted

HOST = "127.0.0.1"
TOKENS = smollm2_tokenizer()
KEY = "a-key-0123456789abcdef"
USER: Any = {"role": "user", "content": "Hi there"}
TOOL: Any = {"name": "weather", "description": "Tells it.", "input_schema": {"type": "object", "properties": {}}}
ASKED: dict[str, Any] = {"model": "test-model", "messages": [USER], "max_tokens": 4}


@pytest.fixture
async def scheduler(tmp_path: Path) -> AsyncIterator[FakeScheduler]:
    fake = FakeScheduler(socket_address(tmp_path, "one"), next_token=scripted(TOKENS.encode(" a b c d e f g h")))
    async with running_schedulers(fake):
        yield fake


@pytest.fixture
async def url(scheduler: FakeScheduler, tmp_path: Path) -> AsyncIterator[str]:
    path = tmp_path / "keys"
    path.write_text(f"keys: [{{name: a, key: {KEY}}}]")
    path.chmod(0o600)
    async with running_router([scheduler.address]) as (server, _):
        await server.wait_ready()
        gateway = Gateway(server.intake, server.registry, server.readiness, max_body_bytes=100_000, keys=Keys(path))
        serving = GatewayServer(gateway, HOST, 0)
        serving.start()
        yield f"http://{HOST}:{serving.port}"
        await serving.stop()


@pytest.fixture
async def client(url: str) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
async def http(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, headers={"x-api-key": KEY}) as client:
        yield client


def prompt(scheduler: FakeScheduler) -> str:
    """The text of the latest one."""
    return TOKENS.decode(list(scheduler.prompts.values())[-1], skip_special_tokens=False)


def input_tokens(usage: anthropic.types.Usage | anthropic.types.MessageDeltaUsage) -> int:
    assert usage.input_tokens is not None
    assert usage.cache_read_input_tokens is not None
    return usage.input_tokens + usage.cache_read_input_tokens


# --- Whole messages


async def test_a_message(client: anthropic.AsyncAnthropic, scheduler: FakeScheduler) -> None:
    blocks: Any = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief.", "cache_control": None}]
    # This release of the client has no arguments for them.
    sampling = {"temperature": 0.5, "top_p": 0.25, "top_k": 7}
    message = await client.messages.create(**ASKED, system=blocks, extra_body=sampling)
    (block,) = message.content
    assert (block.type, getattr(block, "text", None)) == ("text", " a b c d")
    assert (message.role, message.model, message.type) == ("assistant", "test-model", "message")
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert message.id.startswith("msg_")
    asked = scheduler.prompts[1]
    assert (input_tokens(message.usage), message.usage.output_tokens) == (len(asked), 4)
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n"
    assert prompt(scheduler) == text
    submitted = scheduler.submitted[0].sampling
    assert {name: getattr(submitted, name) for name in sampling} == sampling


async def test_why_a_message_stops(client: anthropic.AsyncAnthropic) -> None:
    stopped = await client.messages.create(**{**ASKED, "max_tokens": 50}, stop_sequences=["zz", " c"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " c")
    assert getattr(stopped.content[0], "text", None) == " a b"
    ended = await client.messages.create(**{**ASKED, "max_tokens": 50})
    assert (ended.stop_reason, ended.stop_sequence) == ("end_turn", None)
    assert getattr(ended.content[0], "text", None) == " a b c d e f g h"


async def test_no_tokens_are_asked_for(client: anthropic.AsyncAnthropic) -> None:
    message = await client.messages.create(**{**ASKED, "max_tokens": 0})
    assert (message.content, message.stop_reason, message.usage.output_tokens) == ([], "max_tokens", 0)


async def test_an_answer_that_has_begun_goes_on(client: anthropic.AsyncAnthropic, scheduler: FakeScheduler) -> None:
    begun: Any = {"role": "assistant", "content": [{"type": "text", "text": "It is"}]}
    await client.messages.create(**{**ASKED, "messages": [USER, begun]})
    assert prompt(scheduler).endswith("<|im_start|>assistant\nIt is")


async def test_tools_reach_the_template_as_openais_do(http: httpx.AsyncClient) -> None:
    """SmolLM2's template shows no tools, so this looks at the message that the gateway makes."""
    (message,) = parse("messages", _json({**ASKED, "tools": [TOOL]}), "r", is_strict=True).take_requests()
    (tool,) = message.chat.tools
    assert (tool.name, tool.description) == (TOOL["name"], TOOL["description"])
    assert json.loads(tool.parameters_json) == TOOL["input_schema"]
    none = {**ASKED, "tools": [TOOL], "tool_choice": {"type": "none"}, "output_config": {"effort": "low"}}
    (message,) = parse("messages", _json(none), "r", is_strict=True).take_requests()
    assert not message.chat.tools
    assert json.loads(message.chat.template_arguments_json) == {"reasoning_effort": "low"}
    automatic = {"type": "auto", "disable_parallel_tool_use": True}
    answer = await http.post("/v1/messages", json={**ASKED, "tools": [TOOL], "tool_choice": automatic})
    assert answer.status_code == 200


async def test_tokens_are_counted(client: anthropic.AsyncAnthropic) -> None:
    asked: Any = {"model": "test-model", "messages": [USER], "system": "Be brief."}
    counted = await client.messages.count_tokens(**asked)
    message = await client.messages.create(**asked, max_tokens=1)
    assert counted.input_tokens == input_tokens(message.usage)


# --- Streams


async def test_a_stream(client: anthropic.AsyncAnthropic) -> None:
    whole = await client.messages.create(**ASKED)
    async with client.messages.stream(**ASKED) as stream:
        pieces = [text async for text in stream.text_stream]
        message = await stream.get_final_message()
    assert "".join(pieces) == " a b c d"
    assert message.model_dump(exclude={"id"}, exclude_none=True) == whole.model_dump(exclude={"id"}, exclude_none=True)


async def test_the_events_of_a_stream(client: anthropic.AsyncAnthropic, http: httpx.AsyncClient) -> None:
    events = [each async for each in await client.messages.create(**ASKED, stop_sequences=[" c"], stream=True)]
    kinds = [event.type for event in events]
    begin, end = ["message_start", "content_block_start"], ["content_block_stop", "message_delta", "message_stop"]
    assert (kinds[:2], kinds[-3:]) == (begin, end)
    assert set(kinds[2:-3]) == {"content_block_delta"}
    first, last = events[0], events[-2]
    assert first.type == "message_start"
    assert last.type == "message_delta"
    # How many of them were cached is known at the end.
    usage = first.message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (input_tokens(last.usage), 0)
    assert last.usage.cache_read_input_tokens
    assert (last.delta.stop_reason, last.delta.stop_sequence) == ("stop_sequence", " c")
    async with http.stream("POST", "/v1/messages", json={**ASKED, "stream": True}) as answer:
        lines = [line async for line in answer.aiter_lines() if line]
    assert lines[0] == "event: message_start"
    assert "data: [DONE]" not in lines


async def test_a_stream_that_breaks_ends_with_an_error(
    client: anthropic.AsyncAnthropic, scheduler: FakeScheduler
) -> None:
    scheduler.pause_at = 2
    stream = await client.messages.create(**ASKED, stream=True)
    texts: list[str] = []

    async def read() -> None:
        async for event in stream:
            if event.type == "content_block_delta":
                texts.append(event.type)
                scheduler.is_broken, scheduler.pause_at = True, None

    with pytest.raises(anthropic.APIStatusError, match="api_error"):
        await asyncio.wait_for(read(), 30)
    assert texts


# --- What is refused


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_tokens", None, "max_tokens: Field required"),
        ("max_tokens", 5000, "max_tokens=5000 after a prompt"),
        ("messages", [], "messages: List should have at least 1"),
        ("messages", [{"role": "user", "content": [IMAGE]}], "messages.0.content.0.source: its base64"),
        ("messages", [{"role": "user", "content": [{"type": "text"}]}], "a block of type text needs text"),
        ("messages", [{"role": "robot", "content": "x"}], "messages.0.role"),
        ("system", [IMAGE], "system.0: type='image'"),
        ("temperature", -1, "temperature=-1: use a number in"),
        ("stop_sequences", [""], "stop_sequences.0"),
        ("tool_choice", {"type": "any"}, "tool_choice asks for a call, and there are no tools"),
        ("tool_choice", {"type": "some"}, "tool_choice.type: Input should be 'auto', 'any', 'tool' or 'none'"),
        ("tools", [{"type": "web_search_20250305", "name": "web_search"}], "tools.0: type='web_search_20250305'"),
        ("tools", [{"name": "f"}], "tools.0: a tool needs input_schema"),
        ("thinking", {"type": "some"}, "thinking.type: Input should be 'enabled', 'adaptive' or 'disabled'"),
        ("messages", [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}], "type tool_use needs name"),
        ("output_config", {"format": {"type": "json_schema", "schema": {}}}, "output_config.format is set: no replica"),
        ("output_config", {"format": {"type": "yaml"}}, "output_config.format.type: there is no other format"),
    ],
)
async def test_what_is_not_there_is_refused_by_name(
    http: httpx.AsyncClient, field: str, value: object, message: str
) -> None:
    answer = await http.post("/v1/messages", json={**ASKED, field: value})
    body = answer.json()
    assert (answer.status_code, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
    assert message in body["error"]["message"]
    assert set(body["error"]) == {"type", "message"}


async def test_fields_without_effect_and_unknown_ones(http: httpx.AsyncClient) -> None:
    schema = MessagesRequest.model_fields | CountTokensRequest.model_fields
    effects = {name: each for name, field in schema.items() for each in field.metadata if isinstance(each, Effect)}
    accepted = {name: {"a": 1} for name, effect in effects.items() if not effect.is_refused}
    answer = await http.post(
        "/v1/messages", json={**ASKED, **accepted, "thinking": {"type": "disabled"}, "typical_p": 1}
    )
    assert (answer.status_code, answer.headers["x-octavo-ignored-fields"]) == (200, "typical_p")
    for name, effect in effects.items():
        if effect.is_refused:
            answer = await http.post("/v1/messages", json={**ASKED, name: ["something"]})
            assert answer.status_code == 400
            assert answer.json()["error"]["message"] == f"{name}: {effect.says}"


async def test_errors_have_anthropics_shape(url: str, http: httpx.AsyncClient, scheduler: FakeScheduler) -> None:
    async def error(status: int, path: str = "/v1/messages", **given: Any) -> str:
        answer = await http.post(path, **{"json": ASKED, **given})
        assert answer.status_code == status, answer.text
        assert answer.json()["type"] == "error"
        return answer.json()["error"]["type"]

    assert await error(404, json={**ASKED, "model": "other"}) == "not_found_error"
    assert await error(404, "/v1/messages/count_tokens", json={**ASKED, "model": "other"}) == "not_found_error"
    assert await error(404, "/v1/messages/batches") == "not_found_error"
    assert await error(401, headers={"x-api-key": "wrong"}) == "authentication_error"
    assert await error(413, json={**ASKED, "system": "x" * 200_000}) == "request_too_large"
    assert await error(400, json=None, content=b"{") == "invalid_request_error"
    scheduler.capacity = 0
    assert await error(429) == "rate_limit_error"
    other = await http.post("/v1/chat/completions", json={"messages": [USER], "model": "other"})
    assert other.json()["error"]["code"] == "model_not_found"


async def test_the_client_raises_its_own_errors(url: str, client: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="is not served here"):
        await client.messages.create(**{**ASKED, "model": "other"})
    async with anthropic.AsyncAnthropic(base_url=url, api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(anthropic.AuthenticationError, match="not known here"):
            await stranger.messages.create(**ASKED)
    async with anthropic.AsyncAnthropic(base_url=url, auth_token=KEY, max_retries=0) as bearer:
        assert (await bearer.messages.create(**ASKED)).content


async def test_a_router_without_replicas_is_overloaded(tmp_path: Path) -> None:
    async with running_router([socket_address(tmp_path, "none")]) as (server, _):
        gateway = Gateway(server.intake, server.registry, server.readiness, max_body_bytes=10_000)
        serving = GatewayServer(gateway, HOST, 0)
        serving.start()
        async with httpx.AsyncClient(base_url=f"http://{HOST}:{serving.port}") as client:
            answer = await client.post("/v1/messages", json=ASKED)
        await serving.stop()
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "overloaded_error")
