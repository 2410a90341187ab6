"""Fields of OpenAI's and vLLM's requests over HTTP: what each does, and what becomes of those that do nothing."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.api.gateway.app import Gateway
from router.api.gateway.openai.fields import Effect
from router.api.gateway.openai.schemas import ChatCompletionRequest, CompletionRequest
from router.api.gateway.server import GatewayServer
from tests.fakes.routers import running_router, running_schedulers, smollm2_tokenizer, socket_address
from tests.fakes.scheduler import FakeScheduler

HOST = "127.0.0.1"
TOKENS = smollm2_tokenizer()
USER = {"role": "user", "content": "Hi there"}


@pytest.fixture
async def scheduler(tmp_path: Path) -> AsyncIterator[FakeScheduler]:
    fake = FakeScheduler(socket_address(tmp_path, "one"))
    async with running_schedulers(fake):
        yield fake


@pytest.fixture
async def http(scheduler: FakeScheduler) -> AsyncIterator[httpx.AsyncClient]:
    async with running_router([scheduler.address]) as (server, _):
        await server.wait_ready()
        gateway = Gateway(
            server.intake, server.registry, server.readiness, max_body_bytes=100_000, allowed_origins=("https://a.b",)
        )
        serving = GatewayServer(gateway, HOST, 0)
        serving.start()
        async with httpx.AsyncClient(base_url=f"http://{HOST}:{serving.port}") as client:
            yield client
        await serving.stop()


async def _ask(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await http.post(path, json={"max_tokens": 4, "seed": 1, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def _complete(http: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    return await _ask(http, "/v1/completions", body)


async def _chat(http: httpx.AsyncClient, *messages: dict[str, Any], **body: Any) -> dict[str, Any]:
    return await _ask(http, "/v1/chat/completions", {"messages": list(messages), **body})


async def _stream(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    body = {"max_tokens": 4, "seed": 1, "stream": True, **body}
    async with http.stream("POST", path, json=body) as answer:
        lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return list(map(json.loads, lines))


def _token_ids(pieces: list[dict[str, Any]]) -> list[int]:
    return [token_id for piece in pieces for token_id in piece["choices"][0]["token_ids"]]


# --- The prompt


async def test_the_prompts_tokens_are_scored(http: httpx.AsyncClient) -> None:
    """As lm-eval asks: its tasks read token_logprobs and top_logprobs at the prompt's places."""
    ids = TOKENS.encode("Once upon a time")
    scored = await _complete(http, prompt=ids, echo=True, logprobs=1, max_tokens=1, temperature=0)
    (choice,) = scored["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith("Once upon a time")
    assert len(logprobs["tokens"]) == len(ids) + 1
    assert "".join(logprobs["tokens"][:-1]) == "Once upon a time"
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    assert all(isinstance(each, float) for each in logprobs["token_logprobs"][1:])
    assert all(len(each) == 1 for each in logprobs["top_logprobs"][1:])
    assert logprobs["text_offset"] == [len("".join(logprobs["tokens"][:i])) for i in range(len(ids) + 1)]

    alone = await _complete(http, prompt="Once upon a time", echo=True, logprobs=1, max_tokens=0, temperature=0)
    (other,) = alone["choices"]
    assert other["text"] == "Once upon a time"
    assert other["logprobs"] == {name: values[:-1] for name, values in logprobs.items()}
    assert (alone["usage"]["completion_tokens"], other["finish_reason"]) == (0, "length")

    pieces = await _stream(http, "/v1/completions", {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 1})
    assert [token for piece in pieces for token in piece["choices"][0]["logprobs"]["tokens"]] == logprobs["tokens"]


async def test_prompt_logprobs_have_vllms_shape(http: httpx.AsyncClient) -> None:
    ids = TOKENS.encode("Once upon a time")
    for answer in (
        (await _complete(http, prompt=ids, prompt_logprobs=1))["choices"][0],
        await _chat(http, USER, prompt_logprobs=1),
    ):
        first, second, *_ = answer["prompt_logprobs"]
        assert first is None
        for token_id, each in second.items():
            assert each["decoded_token"] == TOKENS.token_text(int(token_id))
            assert each["rank"] >= 1
            assert each["logprob"] <= 0


async def test_a_prompt_is_truncated_on_either_side(http: httpx.AsyncClient, scheduler: FakeScheduler) -> None:
    ids = list(range(1000, 1010))
    await _complete(http, prompt=ids, truncate_prompt_tokens=3)
    await _complete(http, prompt=ids, truncate_prompt_tokens=3, truncation_side="right")
    await _complete(http, prompt=ids, truncate_prompt_tokens=20)
    long = [1000] * 3000
    await _complete(http, prompt=long, truncate_prompt_tokens=-1, max_tokens=8)
    assert list(scheduler.prompts.values()) == [ids[-3:], ids[:3], ids, long[: 2048 - 8]]
    refused = await http.post("/v1/completions", json={"prompt": long})
    assert refused.status_code == 400


async def test_special_tokens_and_the_last_message(http: httpx.AsyncClient, scheduler: FakeScheduler) -> None:
    await _complete(http, prompt="x", add_special_tokens=False)
    begun = {"role": "assistant", "content": "It is called "}
    answer = await _chat(http, USER, begun, continue_final_message=True, add_generation_prompt=False, echo=True)
    message = answer["choices"][0]["message"]
    assert message["content"].startswith("It is called ")
    assert message["role"] == "assistant"
    plain, continued = scheduler.prompts.values()
    assert plain == TOKENS.encode("x", add_special_tokens=False)
    text = TOKENS.decode(continued, skip_special_tokens=False)
    assert text.endswith("<|im_start|>assistant\nIt is called ")


async def test_messages_have_any_role_and_any_key_and_parts_of_text(
    http: httpx.AsyncClient, scheduler: FakeScheduler
) -> None:
    parts = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "refusal", "refusal": "b"}]
    answer = await _chat(
        http, {"role": "critic", "content": parts, "mood": "bad"}, reasoning_effort="low", documents=[]
    )
    assert answer["choices"][0]["finish_reason"] == "length"
    assert "<|im_start|>critic\nab<|im_end|>" in TOKENS.decode(scheduler.prompts[1], skip_special_tokens=False)
    # A template that shows them gets the keys.
    image = {"type": "image_url", "image_url": {"url": "http://nowhere"}}
    refused = await http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": [image]}]})
    assert refused.status_code == 400
    assert "this model takes text only" in refused.json()["error"]["message"]


# --- The answer


async def test_token_ids_come_with_the_answer(http: httpx.AsyncClient, scheduler: FakeScheduler) -> None:
    whole = await _complete(http, prompt="Once", return_token_ids=True, logprobs=0, return_tokens_as_token_ids=True)
    (choice,) = whole["choices"]
    assert choice["prompt_token_ids"] == scheduler.prompts[1] == TOKENS.encode("Once")
    assert TOKENS.decode(choice["token_ids"], skip_special_tokens=True) == choice["text"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]

    chat = await _chat(http, USER, return_token_ids=True, return_prompt_text=True)
    assert chat["prompt_text"] == TOKENS.decode(chat["prompt_token_ids"], skip_special_tokens=False)
    content = chat["choices"][0]["message"]["content"]
    assert TOKENS.decode(chat["choices"][0]["token_ids"], skip_special_tokens=True) == content
    pieces = await _stream(http, "/v1/chat/completions", {"messages": [USER], "return_token_ids": True})
    assert pieces[0]["prompt_token_ids"] == chat["prompt_token_ids"]
    assert not any("prompt_token_ids" in piece for piece in pieces[1:])
    assert _token_ids(pieces) == chat["choices"][0]["token_ids"]


async def test_usage_comes_with_each_chunk_or_last(http: httpx.AsyncClient) -> None:
    """As guidellm asks."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path, body in (("completions", {"prompt": [5, 6, 7]}), ("chat/completions", {"messages": [USER]})):
        pieces = await _stream(http, f"/v1/{path}", {**body, "stream_options": options})
        counts = [piece["usage"]["completion_tokens"] for piece in pieces]
        assert counts == sorted(counts)
        assert counts[-2:] == [4, 4]
        assert counts[0] < 4 or len(counts) == 2
        assert len({piece["usage"]["prompt_tokens"] for piece in pieces}) == 1
        assert pieces[-1]["choices"] == []


async def test_chunks_hold_as_many_tokens_as_asked_for(http: httpx.AsyncClient) -> None:
    body = {"prompt": "x", "max_tokens": 7, "return_token_ids": True}
    single = await _stream(http, "/v1/completions", body)
    joined = await _stream(http, "/v1/completions", {**body, "stream_interval": 3})
    sizes = [len(piece["choices"][0]["token_ids"]) for piece in joined]
    assert sum(sizes) == 7
    assert min(sizes[:-1], default=3) >= 3
    assert _token_ids(joined) == _token_ids(single)
    texts = ["".join(piece["choices"][0]["text"] for piece in pieces) for pieces in (single, joined)]
    assert texts[0] == texts[1]


async def test_the_best_are_the_likeliest(http: httpx.AsyncClient) -> None:
    every = await _complete(http, prompt="x", n=5, logprobs=0)
    best = await _complete(http, prompt="x", n=2, best_of=5)

    def mean(choice: dict[str, Any]) -> float:
        values = choice["logprobs"]["token_logprobs"]
        return sum(values) / len(values)

    ranked = sorted(every["choices"], key=mean, reverse=True)
    assert [choice["text"] for choice in best["choices"]] == [choice["text"] for choice in ranked[:2]]
    assert [(choice["index"], choice["logprobs"]) for choice in best["choices"]] == [(0, None), (1, None)]
    assert best["usage"]["completion_tokens"] == 20


async def test_ids_in_the_body(http: httpx.AsyncClient, scheduler: FakeScheduler) -> None:
    answer = await _complete(http, prompt="x", request_id="mine", session_id="s")
    assert answer["id"] == "cmpl-mine"
    stopped = await _complete(http, prompt="x", stop_token_ids=[int(scheduler.submitted[0].sampling.seed)])
    assert "stop_reason" in stopped["choices"][0]


# --- Fields that do nothing


def _effects(schema: type) -> dict[str, Effect]:
    return {
        name: effect
        for name, field in schema.model_fields.items()  # type: ignore[attr-defined]
        for effect in field.metadata
        if isinstance(effect, Effect)
    }


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_every_field_that_does_nothing_says_so(http: httpx.AsyncClient, path: str) -> None:
    schema, body = (
        (CompletionRequest, {"prompt": "x"}) if path == "completions" else (ChatCompletionRequest, {"messages": [USER]})
    )
    effects = _effects(schema)
    accepted = {name: {"a": 1} for name, effect in effects.items() if not effect.is_refused}
    nothing = {name: None for name, effect in effects.items() if effect.is_refused}
    assert len(accepted) >= 10
    assert len(nothing) >= 14
    await _ask(http, f"/v1/{path}", {**body, **accepted, **nothing})
    for name, effect in effects.items():
        if effect.is_refused:
            answer = await http.post(f"/v1/{path}", json={**body, name: ["something"]})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, name)
            assert effect.says in error["message"]


async def test_unknown_fields_are_named_and_counted(http: httpx.AsyncClient, scheduler: FakeScheduler) -> None:
    body = {
        "prompt": "x",
        "max_tokens": 1,
        "typical_p": 0.9,
        "max_tokns": 3,
        "a\nb": 1,
        "absent": None,
        "stream_options": {"chunks": 3},
    }
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200
    assert answer.headers["x-octavo-ignored-fields"] == "typical_p, max_tokns, other, chunks"
    async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as streamed:
        assert "typical_p" in streamed.headers["x-octavo-ignored-fields"]
    metrics = (await http.get("/metrics")).text
    assert 'octavo_http_ignored_fields_total{field="typical_p"} 2.0' in metrics
    assert 'octavo_http_ignored_fields_total{field="other"} 6.0' in metrics
    assert "max_tokns" not in metrics


async def test_strict_fields_refuses_unknown_ones(scheduler: FakeScheduler) -> None:
    async with running_router([scheduler.address]) as (server, _):
        await server.wait_ready()
        gateway = Gateway(server.intake, server.registry, server.readiness, max_body_bytes=10_000, strict_fields=True)
        serving = GatewayServer(gateway, HOST, 0)
        serving.start()
        async with httpx.AsyncClient(base_url=f"http://{HOST}:{serving.port}") as client:
            answer = await client.post("/v1/completions", json={"prompt": "x", "max_tokns": 3})
        await serving.stop()
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "max_tokns")
    assert "there is no such field here" in error["message"]


# --- Other endpoints


async def test_texts_and_chats_are_tokenized(http: httpx.AsyncClient) -> None:
    answer = (await http.post("/tokenize", json={"prompt": "Hi there", "return_token_strs": True})).json()
    ids = TOKENS.encode("Hi there")
    assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (ids, len(ids), 2048)
    assert "".join(answer["token_strs"]) == "Hi there"
    chat = (await http.post("/tokenize", json={"messages": [USER]})).json()
    whole = await _chat(http, USER, return_token_ids=True)
    assert chat["tokens"] == whole["prompt_token_ids"]
    back = (await http.post("/detokenize", json={"tokens": ids})).json()
    assert back == {"prompt": "Hi there"}
    for path, body, param in (
        ("tokenize", {"prompt": 3}, "prompt"),
        ("detokenize", {"tokens": [-1]}, "tokens"),
        ("detokenize", {"tokens": ["a"]}, "tokens"),
    ):
        refused = await http.post(f"/{path}", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert (await http.post("/tokenize", json={"prompt": "x", "model": "other"})).status_code == 404


async def test_the_small_endpoints(http: httpx.AsyncClient) -> None:
    assert set((await http.get("/version")).json()) == {"version"}
    assert (await http.get("/load")).json() == {"server_load": 0}
    assert (await http.get("/ping")).status_code == (await http.post("/ping")).status_code == 200
    completed = await _ask(http, "/invocations", {"prompt": "x"})
    assert completed["object"] == "text_completion"
    chat = await _ask(http, "/invocations", {"messages": [USER]})
    assert chat["object"] == "chat.completion"
    for path in ("/v1/embeddings", "/rerank"):
        answer = await http.post(path, json={"input": "x"})
        assert answer.status_code == 404
        assert "no such models yet" in answer.json()["error"]["message"]


async def test_pages_of_an_allowed_origin_may_call(http: httpx.AsyncClient) -> None:
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    allowed = await http.options("/v1/models", headers={"Origin": "https://a.b", **ask})
    assert allowed.headers["access-control-allow-origin"] == "https://a.b"
    other = await http.options("/v1/models", headers={"Origin": "https://c.d", **ask})
    assert "access-control-allow-origin" not in other.headers
