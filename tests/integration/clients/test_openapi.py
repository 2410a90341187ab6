"""/openapi.json tells what the gateway takes and answers, and /docs shows it without another host."""

import json
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openapi_spec_validator
import pytest
from openapi_schema_validator import OAS30Validator
from referencing import Registry
from referencing.jsonschema import DRAFT4
from starlette.routing import Route

from router.api.gateway.app import Gateway
from router.api.gateway.batches.store import BatchStore
from router.api.gateway.openai.fields import Effect
from router.api.gateway.openai.schemas import ChatCompletionRequest
from router.api.gateway.openapi import document as made
from router.api.gateway.openapi.document import OPERATIONS
from router.api.gateway.server import GatewayServer
from router.security.keys import Keys
from tests.fakes.routers import running_router, running_schedulers, smollm2_tokenizer, socket_address
from tests.fakes.scheduler import FakeScheduler, scripted
from tests.support.gateways import running_gateway

HOST = "127.0.0.1"
USER = {"role": "user", "content": "Hi there"}


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    scheduler = FakeScheduler(socket_address(tmp_path, "one"))
    keys = tmp_path / "keys.yaml"
    keys.touch(mode=0o600)
    keys.write_text("keys:\n  - {name: t, key: a-long-enough-key}\n")
    async with running_schedulers(scheduler), running_router([scheduler.address]) as (server, _):
        await server.wait_ready()
        yield Gateway(
            server.intake,
            server.registry,
            server.readiness,
            max_body_bytes=100_000,
            keys=Keys(keys),
            batches=BatchStore(tmp_path / "batches", 2**20),
        )


@pytest.fixture
async def http(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    serving = GatewayServer(gateway, HOST, 0)
    serving.start()
    async with httpx.AsyncClient(base_url=f"http://{HOST}:{serving.port}") as client:
        yield client
    await serving.stop()


@pytest.fixture
async def document(http: httpx.AsyncClient) -> dict[str, Any]:
    return (await http.get("/openapi.json")).json()


def problems(document: dict[str, Any], schema: dict[str, Any], value: Any) -> list[str]:
    resource = DRAFT4.create_resource(document)
    validator = OAS30Validator(
        {"allOf": [json.loads(json.dumps(schema).replace('"#/', '"urn:document#/'))]},
        registry=Registry().with_resource("urn:document", resource),
    )
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(value)]


async def test_the_document_is_valid_and_has_every_route(gateway: Gateway, document: dict[str, Any]) -> None:
    openapi_spec_validator.validate(document)
    told = {(method, path) for path, methods in document["paths"].items() for method in methods}
    routed = {
        (method.lower(), re.sub(r":\w+}", "}", route.path))
        for route in gateway.app.routes
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD"
    }
    assert routed - told == {("get", "/docs/{file}")}
    assert told <= routed
    # The console is an option.
    assert OPERATIONS.keys() - {f"{method} {path}" for method, path in told} == {"get /console"}
    # Models of one name are told apart by their API, in a checkout as in the wheel.
    schemas = document["components"]["schemas"]
    assert {"openai.Message", "anthropic.Message", "openai.Tool", "responses.Tool"} <= schemas.keys()
    assert not [name for name in schemas if "__" in name]
    names = [each["operationId"] for methods in document["paths"].values() for each in methods.values()]
    assert len(set(names)) == len(names)


async def test_fields_say_what_becomes_of_them(document: dict[str, Any]) -> None:
    fields = document["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert fields.keys() == ChatCompletionRequest.model_fields.keys()
    for name, field in ChatCompletionRequest.model_fields.items():
        for effect in field.metadata:
            if isinstance(effect, Effect):
                expected = "Refused" if effect.is_refused else "No effect"
                assert fields[name]["description"] == f"{expected}: {effect.says}."
    assert fields["top_k"]["description"].endswith("Use at least 1, or 0 or -1 for off.")
    assert fields["max_tokens"] == {"type": "integer", "minimum": 0, "maximum": 2**32, "exclusiveMaximum": True}
    assert fields["stream_options"] == {"$ref": "#/components/schemas/StreamOptions"}


ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": [[5], [6, 7]], "logprobs": 1, "return_token_ids": True, "prompt_logprobs": 1}),
    ("/v1/chat/completions", {"messages": [USER], "n": 2, "stop": ["a"], "return_prompt_text": True}),
    ("/v1/chat/completions/batch", {"messages": [[USER], [USER]]}),
    ("/invocations", {"messages": [USER]}),
    ("/v1/responses", {"input": "Hi"}),
    ("/v1/messages", {"messages": [USER]}),
    ("/v1/messages/count_tokens", {"messages": [USER]}),
    ("/tokenize", {"prompt": "Hi", "return_token_strs": True}),
    ("/detokenize", {"tokens": [5, 6]}),
]


@pytest.mark.parametrize(("path", "body"), ASKED, ids=[path for path, _ in ASKED])
async def test_requests_answers_and_errors_are_as_told(
    http: httpx.AsyncClient, document: dict[str, Any], path: str, body: dict[str, Any]
) -> None:
    http.headers["authorization"] = "Bearer a-long-enough-key"
    operation = document["paths"][path]["post"]
    taken = operation["requestBody"]["content"]["application/json"]["schema"]
    limit = {"/v1/responses": "max_output_tokens", "/tokenize": "x", "/detokenize": "x"}.get(path, "max_tokens")
    body = {**body, limit: 3}
    assert problems(document, taken, body) == []
    assert problems(document, taken, {"model": 5}) != []
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    content = operation["responses"]["200"]["content"]
    assert problems(document, content["application/json"]["schema"], answer.json()) == []
    if "text/event-stream" in content:
        streamed = {name: value for name, value in body.items() if name != "prompt_logprobs"}
        events = (await http.post(path, json={**streamed, "stream": True})).text.split("data: ")[1:]
        for event in events:
            data = event.split("\n", 1)[0].strip()
            if data != "[DONE]":
                told = content["text/event-stream"]["schema"]
                assert problems(document, told, json.loads(data)) == [], data
    refused = await http.post(path, json={**body, "model": 5})
    assert refused.status_code == 400
    told = operation["responses"]["400"]["content"]["application/json"]["schema"]
    assert problems(document, told, refused.json()) == []


async def test_other_answers_are_as_told(http: httpx.AsyncClient, document: dict[str, Any]) -> None:
    http.headers["authorization"] = "Bearer a-long-enough-key"
    for path, shown in (
        ("/v1/models", "/v1/models"),
        ("/v1/models/test-model", "/v1/models/{model}"),
        ("/version", "/version"),
        ("/load", "/load"),
    ):
        told = document["paths"][shown]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        assert problems(document, told, (await http.get(path)).json()) == []
    told = document["paths"]["/v1/models/{model}"]["get"]["responses"]["404"]["content"]["application/json"]["schema"]
    assert problems(document, told, (await http.get("/v1/models/other")).json()) == []
    assert list(document["paths"]["/v1/embeddings"]["post"]["responses"]) == ["404"]


async def test_files_and_batches_are_as_told(http: httpx.AsyncClient, document: dict[str, Any]) -> None:
    http.headers["authorization"] = "Bearer a-long-enough-key"

    def check(method: str, path: str, answer: httpx.Response) -> Any:
        assert answer.status_code == 200, answer.text
        schema = document["paths"][path][method]["responses"]["200"]["content"]["application/json"]["schema"]
        assert problems(document, schema, answer.json()) == [], path
        return answer.json()

    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi"}}
    part = {"file": ("lines.jsonl", json.dumps(line).encode())}
    file = check("post", "/v1/files", await http.post("/v1/files", files=part, data={"purpose": "batch"}))
    check("get", "/v1/files", await http.get("/v1/files"))
    check("get", "/v1/files/{file_id}", await http.get(f"/v1/files/{file['id']}"))
    asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    taken = document["paths"]["/v1/batches"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert problems(document, taken, asked) == []
    batch = check("post", "/v1/batches", await http.post("/v1/batches", json=asked))
    check("get", "/v1/batches", await http.get("/v1/batches"))
    check("get", "/v1/batches/{batch_id}", await http.get(f"/v1/batches/{batch['id']}"))
    check("post", "/v1/batches/{batch_id}/cancel", await http.post(f"/v1/batches/{batch['id']}/cancel"))
    check("delete", "/v1/files/{file_id}", await http.delete(f"/v1/files/{file['id']}"))


TOOL = {"name": "f", "parameters": {"type": "object"}}


async def test_answers_with_reasoning_and_calls_are_as_told(tmp_path: Path) -> None:
    """They have fields, finishes and blocks that others lack."""
    scheduler = FakeScheduler(socket_address(tmp_path, "one"))
    output = '<think>Hm.</think>Well.<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    scheduler.next_token = scripted(smollm2_tokenizer().encode(output, add_special_tokens=False))
    parsers: Any = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    async with (
        running_schedulers(scheduler),
        running_gateway(scheduler, **parsers) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        document = (await client.get("/openapi.json")).json()
        for path, body in (
            ("/v1/chat/completions", {"messages": [USER], "tools": [{"type": "function", "function": TOOL}]}),
            ("/v1/messages", {"messages": [USER], "max_tokens": 99, "tools": [{"name": "f", "input_schema": {}}]}),
            ("/v1/responses", {"input": "Hi", "tools": [{"type": "function", **TOOL}]}),
        ):
            content = document["paths"][path]["post"]["responses"]["200"]["content"]
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            assert '"f"' in answer.text
            assert problems(document, content["application/json"]["schema"], answer.json()) == [], path
            streamed = (await client.post(path, json={**body, "stream": True})).text
            events = [line.removeprefix("data: ") for line in streamed.splitlines() if line.startswith("data: {")]
            assert len(events) > 3
            for event in events:
                assert problems(document, content["text/event-stream"]["schema"], json.loads(event)) == [], event


async def test_the_page_needs_no_key_and_no_other_host(http: httpx.AsyncClient) -> None:
    page = await http.get("/docs")
    assert page.status_code == 200
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert "//" not in page.text
    files = re.findall(r'(?:src|href)="(.*?)"', page.text)
    assert len(files) == 4
    for file in files:
        answer = await http.get(f"/{file}")
        assert answer.status_code == 200, file
        assert len(answer.content) > 50
    assert 'url: "openapi.json"' in (await http.get("/docs/start.js")).text
    for path in ("/docs/nothing", "/docs/..%2f__init__.py", "/docs/index.html"):
        assert (await http.get(path)).status_code == 404
    assert (await http.get("/v1/models")).status_code == 401
    assert (await http.get("/docsx")).status_code == 401


async def test_without_the_package_the_page_names_it(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "swagger_ui_bundle", None)
    for path in ("/docs", "/docs/swagger-ui.css"):
        answer = await http.get(path)
        assert answer.status_code == 404
        assert "swagger-ui-bundle: install octavo[docs]" in answer.json()["error"]["message"]
    assert (await http.get("/openapi.json")).status_code == 200


async def test_the_document_is_made_once(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await http.get("/openapi.json")
    monkeypatch.setattr(made, "document", None)
    assert (await http.get("/openapi.json")).content == first.content
