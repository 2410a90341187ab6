"""OpenAI's Responses API over HTTP, with OpenAI's own client: answers, events, and stored conversations."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from router.api.gateway.app import Gateway
from router.api.gateway.responses.store import FileStore, MemoryStore, Store, StoreError
from router.api.gateway.server import GatewayServer
from router.security.keys import Keys
from router.server import RouterServer
from tests.fakes.routers import running_router, running_schedulers, smollm2_tokenizer, socket_address
from tests.fakes.scheduler import FakeScheduler, scripted

HOST = "127.0.0.1"
TOKENS = smollm2_tokenizer()
ANSWER = "It is a small boat."
EVENTS = [
    *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"),
    *("response.output_text.delta", "response.output_text.done", "response.content_part.done"),
    *("response.output_item.done", "response.completed"),
]


@pytest.fixture
async def scheduler(tmp_path: Path) -> AsyncIterator[FakeScheduler]:
    fake = FakeScheduler(socket_address(tmp_path, "one"), next_token=scripted(TOKENS.encode(ANSWER)))
    async with running_schedulers(fake):
        yield fake


@pytest.fixture
async def router(scheduler: FakeScheduler) -> AsyncIterator[RouterServer]:
    async with running_router([scheduler.address]) as (server, _):
        await server.wait_ready()
        yield server


@contextlib.asynccontextmanager
async def gateway_of(
    router: RouterServer, store: Store | None = None, keys: Keys | None = None, **options: Any
) -> AsyncIterator[str]:
    """Serves HTTP. Yields its URL."""
    gateway = Gateway(
        router.intake,
        router.registry,
        router.readiness,
        max_body_bytes=4 * 2**20,
        keys=keys,
        responses=store,
        **options,
    )
    serving = GatewayServer(gateway, HOST, 0)
    serving.start()
    try:
        yield f"http://{HOST}:{serving.port}"
    finally:
        await serving.stop()


def client_of(url: str, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


@pytest.fixture
async def url(router: RouterServer) -> AsyncIterator[str]:
    async with gateway_of(router) as url:
        yield url


@pytest.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(url) as client:
        yield client


def _prompt(scheduler: FakeScheduler) -> str:
    """The last one."""
    return TOKENS.decode(list(scheduler.prompts.values())[-1], skip_special_tokens=False)


def _turns(*turns: tuple[str, str]) -> str:
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + "<|im_start|>assistant\n"


# --- Answers


async def test_a_response_has_openais_shape(client: openai.AsyncOpenAI, scheduler: FakeScheduler) -> None:
    response = await client.responses.create(
        model="test-model",
        instructions="Be brief.",
        input="What is it?",
        temperature=0,
        top_p=0.5,
        metadata={"color": "red"},
        user="me",
        service_tier="auto",
    )
    assert (response.output_text, response.status, response.error) == (ANSWER, "completed", None)
    assert (response.metadata, response.instructions) == ({"color": "red"}, "Be brief.")
    assert (response.temperature, response.top_p, response.model) == (0, 0.5, "test-model")
    assert response.usage is not None
    assert response.usage.input_tokens == len(scheduler.prompts[1])
    assert response.usage.output_tokens == len(TOKENS.encode(ANSWER)) + 1
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert _prompt(scheduler) == _turns(("system", "Be brief."), ("user", "What is it?"))
    # The SDK's own types take it as it is.
    type(response).model_validate(response.model_dump())

    short = await client.responses.create(model="", input="What is it?", max_output_tokens=2)
    assert (short.status, short.usage and short.usage.output_tokens) == ("incomplete", 2)
    assert short.incomplete_details is not None
    assert short.incomplete_details.reason == "max_output_tokens"


async def test_messages_tools_and_effort_reach_the_template(
    client: openai.AsyncOpenAI, scheduler: FakeScheduler
) -> None:
    part: Any = {"type": "input_text", "text": "a"}
    items: Any = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [part, part]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}], "id": "msg_1"},
        {"role": "user", "content": "c"},
    ]
    tool: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    response = await client.responses.create(
        model="", input=items, tools=[tool], tool_choice="auto", reasoning={"effort": "low"}
    )
    assert response.tools[0].to_dict() == {**tool, "description": None}
    assert _prompt(scheduler) == _turns(("system", "Be kind."), ("user", "aa"), ("assistant", "b"), ("user", "c"))


async def test_logprobs_come_by_top_logprobs_or_include(client: openai.AsyncOpenAI, scheduler: FakeScheduler) -> None:
    asked: dict[str, Any]
    for asked, num_top in ({"top_logprobs": 1}, 1), ({"include": ["message.output_text.logprobs"]}, 0):
        response: Any = await client.responses.create(model="", input="x", max_output_tokens=3, **asked)
        logprobs = response.output[0].content[0].logprobs
        assert len(logprobs) == 3
        assert scheduler.submitted[-1].sampling.logprobs == num_top
        assert "".join(each.token for each in logprobs) == response.output_text


async def test_a_long_input_is_truncated_only_if_asked(client: openai.AsyncOpenAI, scheduler: FakeScheduler) -> None:
    long = "a b c d " * 1000
    response = await client.responses.create(model="", input=long, truncation="auto", max_output_tokens=8)
    assert response.usage is not None
    assert response.usage.input_tokens == 2048 - 8
    with pytest.raises(openai.BadRequestError):
        await client.responses.create(model="", input=long, truncation="disabled", max_output_tokens=8)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"background": True}, "background", "use stream"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}, "text", "is set: no replica"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text", "needs name and schema"),
        ({"text": {"format": {"type": "grammar"}}}, "text", "type='grammar'"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice", "tool_choice.mode: Field required"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "tool_choice.name: Field required"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice", "tool_choice: use none, auto, required, the name of"),
        ({"tools": [{"type": "web_search"}]}, "tools", "type='web_search'"),
        ({"input": [{"type": "function_call", "call_id": "1"}]}, "input", "an item of type function_call needs name"),
        ({"input": [{"type": "file_search_call"}]}, "input", "type='file_search_call'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "input_image needs image_url"),
        ({"input": 3}, "input", ""),
        ({"metadata": {"a": 1}}, "metadata", ""),
        ({"conversation": "c"}, "conversation", "previous_response_id"),
        ({"prompt": {"id": "p"}}, "prompt", "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens", ""),
        ({"truncation": "some"}, "truncation", ""),
        ({"top_logprobs": 21}, "logprobs", ""),
        ({"temperature": -1}, "temperature", ""),
        ({"previous_response_id": "../../keys"}, "previous_response_id", "is not stored here"),
        ({"previous_response_id": "resp_" + "0" * 32}, "previous_response_id", "is not stored here"),
    ],
)
async def test_what_is_not_there_is_refused_by_name(url: str, body: dict[str, Any], param: str, words: str) -> None:
    async with httpx.AsyncClient(base_url=url) as http:
        answer = await http.post("/v1/responses", json={"input": "x", **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert words in error["message"]


async def test_unknown_fields_are_ignored_and_named(url: str) -> None:
    async with httpx.AsyncClient(base_url=url) as http:
        for stream in (False, True):
            answer = await http.post("/v1/responses", json={"input": "x", "new_thing": 1, "stream": stream})
            assert (answer.status_code, answer.headers["x-octavo-ignored-fields"]) == (200, "new_thing")


# --- Events


async def test_events_come_in_order(client: openai.AsyncOpenAI) -> None:
    stream = await client.responses.create(model="", input="x", stream=True, top_logprobs=1)
    events: list[Any] = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert sorted(set(kinds), key=kinds.index) == EVENTS
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1
    assert "".join(event.delta for event in deltas) == ANSWER
    *_, text, part, item, last = events
    assert text.text == part.part.text == item.item.content[0].text == last.response.output_text == ANSWER
    assert len(text.logprobs) == sum(len(event.logprobs) for event in deltas) == last.response.usage.output_tokens
    assert events[0].response.status == "in_progress"
    assert (await client.responses.retrieve(last.response.id)).to_dict() == last.response.to_dict()

    short = await client.responses.create(model="", input="x", stream=True, max_output_tokens=1)
    ends: Any = [event async for event in short][-1]
    assert (ends.type, ends.response.incomplete_details.reason) == ("response.incomplete", "max_output_tokens")


async def test_the_clients_own_stream_assembles_the_response(client: openai.AsyncOpenAI) -> None:
    async with client.responses.stream(model="", input="x") as stream:
        text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
        final = await stream.get_final_response()
    assert text == final.output_text == ANSWER


async def test_a_stream_that_breaks_ends_with_failed(
    client: openai.AsyncOpenAI, scheduler: FakeScheduler, router: RouterServer
) -> None:
    scheduler.pause_at = 2
    events: list[Any] = []
    async with asyncio.timeout(20):
        async for event in await client.responses.create(model="", input="x", stream=True):
            events.append(event)
            if event.type == "response.output_text.delta":
                router.intake.stop()
    last = events[-1]
    assert (last.type, last.response.status, last.response.error.code) == ("response.failed", "failed", "server_error")
    assert "shutting down" in last.response.error.message
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(last.response.id)


# --- Stored conversations


async def test_a_conversation_goes_on_after_a_restart(
    router: RouterServer, scheduler: FakeScheduler, tmp_path: Path
) -> None:
    directory = tmp_path / "responses"
    async with gateway_of(router, FileStore(directory, 2**20)) as url, client_of(url) as client:
        first = await client.responses.create(model="", instructions="Be brief.", input="One?")
    async with gateway_of(router, FileStore(directory, 2**20)) as url, client_of(url) as client:
        assert (await client.responses.retrieve(first.id)).to_dict() == first.to_dict()
        second = await client.responses.create(
            model="", input="Two?", previous_response_id=first.id, instructions="Be long."
        )
        told = [("user", "One?"), ("assistant", ANSWER), ("user", "Two?")]
        assert _prompt(scheduler) == _turns(("system", "Be long."), *told)
        assert second.previous_response_id == first.id
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
        # The second one holds the whole conversation.
        stream = await client.responses.create(model="", input="3?", previous_response_id=second.id, stream=True)
        last: Any = [event async for event in stream][-1]
        assert _prompt(scheduler).endswith(_turns(*told, ("assistant", ANSWER), ("user", "3?")))
        assert {path.stem for path in directory.glob("*/*")} == {second.id, last.response.id}


async def test_store_false_stores_nothing(client: openai.AsyncOpenAI) -> None:
    response: Any = await client.responses.create(model="", input="x", store=False)
    assert response.store is False
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model="", input="y", previous_response_id=response.id)
    assert refused.value.code == "previous_response_not_found"


async def test_no_tenant_reads_anothers(router: RouterServer, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    one, other = "key-one-0123456789", "key-two-0123456789"
    path.write_text(f"keys: [{{name: one, key: {one}}}, {{name: two, key: {other}}}]")
    path.chmod(0o600)
    for store in (MemoryStore(2**20), FileStore(tmp_path / "responses", 2**20)):
        async with gateway_of(router, store, Keys(path)) as url, client_of(url, one) as mine:
            response = await mine.responses.create(model="", input="x")
            async with client_of(url, other) as client:
                with pytest.raises(openai.NotFoundError):
                    await client.responses.retrieve(response.id)
                with pytest.raises(openai.NotFoundError):
                    await client.responses.delete(response.id)
                with pytest.raises(openai.BadRequestError):
                    await client.responses.create(model="", input="y", previous_response_id=response.id)
            await mine.responses.retrieve(response.id)


async def test_an_answer_that_is_not_stored_says_so(router: RouterServer, tmp_path: Path) -> None:
    directory = tmp_path / "responses"
    store = FileStore(directory, 2**20)
    async with gateway_of(router, store) as url, client_of(url) as client:
        stored: Any = await client.responses.create(model="", input="x")
        assert stored.store is True
        (file,) = directory.glob("*/*")
        # No folder can be made there, as on a full disk.
        file.unlink()
        file.parent.rmdir()
        file.parent.write_bytes(b"")
        answer: Any = await client.responses.create(model="", input="x")
        assert (answer.store, answer.output_text) == (False, ANSWER)
        with pytest.raises(openai.InternalServerError) as failed:
            await client.responses.retrieve(stored.id)
        assert failed.value.status_code == 503
    async with gateway_of(router, MemoryStore(0)) as url, client_of(url) as client:
        answer = await client.responses.create(model="", input="x")
        assert (answer.store, answer.output_text) == (False, ANSWER)


def _id(number: int) -> str:
    return f"resp_{number:032x}"


@pytest.mark.parametrize("kind", ["memory", "files"])
async def test_the_store_drops_the_oldest_of_who_has_most(kind: str, tmp_path: Path) -> None:
    size = 64 * 4096
    store: Store = MemoryStore(size) if kind == "memory" else FileStore(tmp_path, size)
    await store.put("small", _id(0), b"s" * 5000)
    for number in range(1, 200):
        assert await store.put("large", _id(number), b"l" * 3000)
    held = [number for number in range(1, 200) if await store.get("large", _id(number))]
    assert await store.get("small", _id(0)) == b"s" * 5000
    assert held == list(range(held[0], 200))
    assert 50 <= len(held) <= 62
    assert not await store.put("large", _id(200), b"x" * (size + 1))
    for name in ("../x", "resp_../../etc/passwd", "", "resp_" + "G" * 32):
        assert await store.get("large", name) is None
        assert not await store.delete("large", name)


async def test_unfinished_files_are_no_responses_and_go(tmp_path: Path) -> None:
    store = FileStore(tmp_path, 2**20)
    await store.put("t", _id(1), b"{}")
    folder = store.path("t", _id(1)).parent
    left = folder / ".part-left"
    left.write_bytes(b"{")
    FileStore(tmp_path, 2**20)
    assert left.exists()
    os.utime(left, (1, 1))
    FileStore(tmp_path, 2**20)
    assert not left.exists()
    assert await store.get("t", _id(1)) == b"{}"
    with pytest.raises(StoreError, match="responses_dir="):
        FileStore(folder / f"{_id(1)}.json", 2**20)
