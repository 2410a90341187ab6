"""Constraints of clients, by every field of HTTP, and as they reach the scheduler; a fake computes."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pydantic
import pytest

from configs import features
from protos import inference_pb2 as pb
from router.api.gateway.app import Gateway
from router.api.gateway.server import GatewayServer
from tests.fakes.routers import running_router, running_schedulers, smollm2_tokenizer, socket_address
from tests.fakes.scheduler import FakeScheduler, scripted

HOST = "127.0.0.1"
USER: Any = {"role": "user", "content": "Hi there"}
ANSWER = '{"city": "Paris", "inhabitants": 2100000}'


class Capital(pydantic.BaseModel):
    city: str
    inhabitants: int


SCHEMA = Capital.model_json_schema()
IMPOSSIBLE: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}
TAG = {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}
FORMAT = {"type": "json_schema", "json_schema": {"name": "capital", "schema": SCHEMA}}


@pytest.fixture
async def scheduler(tmp_path: Path) -> AsyncIterator[FakeScheduler]:
    address = socket_address(tmp_path, "one")
    answer = smollm2_tokenizer().encode(ANSWER)
    fake = FakeScheduler(address, next_token=scripted(answer), features=[features.CONSTRAINT])
    async with running_schedulers(fake):
        yield fake


@pytest.fixture
async def url(scheduler: FakeScheduler) -> AsyncIterator[str]:
    async with running_router([scheduler.address]) as (server, _):
        await server.wait_ready()
        gateway = Gateway(server.intake, server.registry, server.readiness, max_body_bytes=2**22)
        serving = GatewayServer(gateway, HOST, 0)
        serving.start()
        yield f"http://{HOST}:{serving.port}"
        await serving.stop()


def _constraint(scheduler: FakeScheduler) -> pb.Constraint:
    (submit,) = scheduler.submitted
    scheduler.submitted.clear()
    return submit.sampling.constraint


@pytest.fixture
async def http(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        yield client


_WAYS: tuple[tuple[dict[str, Any], str | None], ...] = (
    ({"response_format": FORMAT}, "json_schema"),
    ({"response_format": {**FORMAT, "json_schema": {**FORMAT["json_schema"], "strict": False}}}, "json_schema"),
    ({"response_format": FORMAT, "structured_outputs": {"disable_any_whitespace": True}}, "json_schema"),
    ({"response_format": {"type": "json_object"}}, "json_object"),
    ({"response_format": {"type": "structural_tag", "format": TAG}}, "structural_tag"),
    (
        {
            "response_format": {
                "type": "structural_tag",
                "structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}],
                "triggers": ["<f"],
            }
        },
        "structural_tag",
    ),
    ({"structured_outputs": {"json": SCHEMA}}, "json_schema"),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, "json_schema"),
    ({"structured_outputs": {"regex": "[a-z]+"}, "response_format": {"type": "text"}}, "regex"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "choice"),
    ({"structured_outputs": {"grammar": 'root ::= "a" | "b"'}}, "grammar"),
    ({"structured_outputs": {"json_object": True, "disable_any_whitespace": True}}, "json_object"),
    ({"structured_outputs": {"structural_tag": json.dumps({"format": TAG})}}, "structural_tag"),
    ({"response_format": {"type": "text"}, "guided_json": None}, None),
)


async def test_each_way_to_say_it(http: httpx.AsyncClient, scheduler: FakeScheduler) -> None:
    for fields, kind in _WAYS:
        for path, prompt in (("/v1/chat/completions", {"messages": [USER]}), ("/v1/completions", {"prompt": "Hi"})):
            answer = await http.post(path, json={**prompt, **fields, "max_tokens": 40})
            assert answer.status_code == 200, answer.text
            sent = _constraint(scheduler)
            assert sent.WhichOneof("kind") == kind, fields
            assert sent.disable_any_whitespace == ("disable_any_whitespace" in fields.get("structured_outputs", {}))
            if kind == "json_schema":
                assert list(json.loads(sent.json_schema)["properties"]) == ["city", "inhabitants"]


_WRONG: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"response_format": IMPOSSIBLE}, "response_format", "response_format.json_schema: "),
    ({"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format", "schema"),
    ({"response_format": {"type": "yaml"}}, "response_format", "use text or json_object"),
    ({"response_format": {"type": "structural_tag"}}, "response_format", "needs format"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "structured_outputs.regex: "),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs", "structured_outputs.json: "),
    ({"structured_outputs": {"choice": []}}, "structured_outputs", "structured_outputs.choice: "),
    ({"structured_outputs": {"grammar": "start: b"}}, "structured_outputs", "structured_outputs.grammar: "),
    ({"structured_outputs": {}}, "structured_outputs", "has no kind"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "use one of them"),
    ({"structured_outputs": {"regex": "a"}, "response_format": FORMAT}, "structured_outputs", "use one of them"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs", "disable_any_whitespace"),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "structured_outputs", "does not go with ignore_eos"),
    ({"structured_outputs": {"regex": "a"}, "use_beam_search": True}, "structured_outputs", "go with beam_search"),
    ({"guided_json": {"type": "object"}}, "guided_json", "use structured_outputs"),
    ({"guided_decoding_backend": "xgrammar"}, "guided_decoding_backend", "use structured_outputs"),
)


async def test_what_is_wrong_is_named_as_the_client_named_it(http: httpx.AsyncClient, scheduler: FakeScheduler) -> None:
    for fields, param, words in _WRONG:
        for stream in (False, True):
            answer = await http.post("/v1/chat/completions", json={"messages": [USER], "stream": stream, **fields})
            assert answer.status_code == 400, fields
            error = answer.json()["error"]
            assert (error["param"], words in error["message"]) == (param, True), (fields, error)
            assert "sampling.constraint" not in error["message"]
    assert not scheduler.submitted


async def test_openais_clients_parse(url: str, scheduler: FakeScheduler) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        chat = await client.chat.completions.parse(model="", messages=[USER], response_format=Capital)
        assert chat.choices[0].message.parsed == Capital(city="Paris", inhabitants=2_100_000)
        in_chat = _constraint(scheduler)
        response = await client.responses.parse(model="", input="Hi there", text_format=Capital)
        assert response.output_parsed == chat.choices[0].message.parsed
        shown = response.text.format if response.text else None
        assert shown is not None
        assert shown.type == "json_schema"
        assert _constraint(scheduler) == in_chat
        await client.responses.create(model="", input="Hi", text={"format": {"type": "json_object"}})
        assert _constraint(scheduler).json_object
        bad: Any = {"type": "json_schema", "name": "a", "schema": {"not": {}}}
        with pytest.raises(openai.BadRequestError, match=r"text\.format: ") as caught:
            await client.responses.create(model="", input="Hi", text={"format": bad})
        assert caught.value.param == "text"


async def test_anthropics_client_sends_a_schema(url: str, scheduler: FakeScheduler) -> None:
    asked: dict[str, Any] = {"type": "json_schema", "schema": SCHEMA}
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        ask = {"model": "", "max_tokens": 40, "messages": [USER]}
        message = await client.messages.create(**ask, output_config={"format": asked})  # type: ignore[call-overload]
        assert json.loads(message.content[0].text) == json.loads(ANSWER)
        assert list(json.loads(_constraint(scheduler).json_schema)["properties"]) == ["city", "inhabitants"]
        await client.messages.create(**ask, extra_body={"output_format": asked})  # type: ignore[call-overload]
        assert _constraint(scheduler).json_schema
        asked["schema"] = {"not": {}}
        with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format: "):
            await client.messages.create(**ask, output_config={"format": asked})  # type: ignore[call-overload]


async def test_a_batch_of_chats_says_which_one_was_wrong(http: httpx.AsyncClient, scheduler: FakeScheduler) -> None:
    body = {"messages": [[USER], [USER]], "structured_outputs": {"regex": "(a"}}
    answer = await http.post("/v1/chat/completions/batch", json=body)
    error = answer.json()["error"]
    assert error["message"].startswith("structured_outputs.regex: ")
    assert "of 2; the other prompts" in error["message"]
