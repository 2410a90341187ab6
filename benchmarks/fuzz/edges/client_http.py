"""Requests that clients send to the router over HTTP, from the headers on; for HTTP's own bytes see sockets.py."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.fuzz.edge import Edge
from benchmarks.fuzz.edges.cluster import SmallCluster, small_cluster
from benchmarks.fuzz.mutation import change_bytes
from router.api.gateway.app import Gateway
from router.api.gateway.batches.store import BatchStore
from router.security.keys import Keys

_KEY = "fuzz-0123456789abcdef"
_PATHS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/", "/health", "/v1/completions/../x"),
    *("/tokenize", "/detokenize", "/invocations", "/v1/embeddings", "/v1/messages", "/v1/messages/count_tokens"),
    *("/v1/responses", "/v1/responses/resp_0", "/v1/batches", "/v1/files", "/v1/chat/completions/batch"),
)
_MAX_BODY, _MAX_FILES = 100_000, 2**20
_COMPLETION: dict[str, Any] = {
    "model": "test-model",
    "prompt": "Hello there",
    "max_tokens": 2,
    "n": 2,
    "stream": False,
    "stop": ["a", "b"],
    "logit_bias": {"5": 1.5},
    "seed": 7,
    "logprobs": 2,
    "temperature": 0.5,
    "echo": True,
    "min_tokens": 1,
    "allowed_token_ids": [5, 6],
    "bad_words": ["no", " never"],
    "logprob_token_ids": [5],
    "repetition_detection": {"max_pattern_size": 4, "min_pattern_size": 1, "min_count": 3},
    "prompt_logprobs": 1,
    "return_token_ids": True,
    "truncate_prompt_tokens": 5,
    "truncation_side": "left",
    "add_special_tokens": True,
    "best_of": 2,
    "request_id": "",
    "session_id": "s",
    "stream_interval": 2,
    "return_tokens_as_token_ids": True,
    "unknown": 1,
    "use_beam_search": False,
    "length_penalty": 0.5,
    "suffix": "",
    "structured_outputs": {"regex": "[a-z]+", "disable_any_whitespace": False},
}
_SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": ["x", 1]}}, "required": ["a"]}
_SEARCH: dict[str, Any] = {
    "prompt": [5, 6, 7],
    "use_beam_search": True,
    "n": 2,
    "best_of": 4,
    "length_penalty": 0.5,
    "max_tokens": 7,
    "stop_token_ids": [21],
    "min_tokens": 1,
    "ignore_eos": False,
    "logprobs": 2,
    "include_stop_str_in_output": True,
}
_CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, {"role": "system", "content": "Be."}],
    "max_completion_tokens": 2,
    "stream": True,
    "top_logprobs": 1,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "continue_final_message": False,
    "documents": [{"text": "d"}],
    "reasoning_effort": "low",
    "return_prompt_text": True,
    "tool_choice": "auto",
    "logprobs": True,
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": _SCHEMA, "strict": True}},
    "chat_template_kwargs": {"a": [1, {"b": None}]},
    "user": "u",
    "metadata": {"k": "v"},
    "chat_template": "",
}
_CHATS: dict[str, Any] = {**_CHAT, "messages": [_CHAT["messages"], _CHAT["messages"][:1]], "stream": False}
_TOKENIZE: dict[str, Any] = {"prompt": "Hello", "add_special_tokens": True, "return_token_strs": True}
_DETOKENIZE: dict[str, Any] = {"tokens": [1, 2, 3], "model": ""}
_COUNT: dict[str, Any] = {
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]}],
    "system": [{"type": "text", "text": "Be."}],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "disabled"},
    "tools": [{"name": "f", "description": "d", "input_schema": {}}],
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": _SCHEMA}},
}
_MESSAGES: dict[str, Any] = {
    **_COUNT,
    "max_tokens": 2,
    "stream": True,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "stop_sequences": ["a"],
    "metadata": {"user_id": "u"},
    "mcp_servers": [],
    "unknown": 1,
}
_RESPONSE: dict[str, Any] = {
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi", "annotations": []}]},
        {"role": "developer", "content": "Be."},
    ],
    "instructions": "Be brief.",
    "previous_response_id": "",
    "store": True,
    "stream": True,
    "max_output_tokens": 2,
    "top_logprobs": 1,
    "include": ["message.output_text.logprobs"],
    "metadata": {"k": "v"},
    "temperature": 0.5,
    "text": {"format": {"type": "json_schema", "name": "s", "schema": _SCHEMA}, "verbosity": "low"},
    "reasoning": {"effort": "low"},
    "truncation": "auto",
    "tools": [{"type": "function", "name": "f", "parameters": {}, "strict": True}],
    "tool_choice": "auto",
    "background": False,
    "stop": ["a"],
    "seed": 7,
    "stream_options": {"include_obfuscation": False},
    "user": "u",
}
_BATCH: dict[str, Any] = {
    "input_file_id": "file-" + "0" * 32,
    "endpoint": "/v1/completions",
    "completion_window": "24h",
    "metadata": {"k": "v"},
    "output_expires_after": {"anchor": "created_at", "seconds": 3600},
}
# A body that is no JSON.
_UPLOAD_PATH, _UPLOAD_TYPE = 15, b"multipart/form-data; boundary=edge"
_UPLOAD = (
    b'--edge\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--edge\r\nContent-Disposition: '
    b'form-data; name="file"; filename="in.jsonl"\r\nContent-Type: text/plain\r\n\r\n{}\n\r\n--edge--\r\n'
)
# Bodies of paths that are not completions.
_BODIES = {
    1: _CHAT,
    6: _TOKENIZE,
    7: _DETOKENIZE,
    8: _SEARCH,
    10: _MESSAGES,
    11: _COUNT,
    12: _RESPONSE,
    14: _BATCH,
    16: _CHATS,
}
# Paths that most messages go to.
_USUAL = (0, 0, 0, 1, 1, 1, 6, 7, 8, 10, 10, 11, 12, 12, 14, 15, 16)
_VALUES: tuple[Any, ...] = (
    None,
    True,
    "",
    "x" * 2000,
    "\0\n",
    "é\U0001f600",
    [],
    {},
    [[]],
    [None],
    {"": None},
    0,
    -1,
    1.5,
    1e308,
    2**31,
    2**32,
    2**63,
    2**64,
    10**40,
    10**400,
    [10**30] * 5,
    ["a"] * 300,
    [[1, 2], [3]],
    [1.5],
    "1",
    {"a": {"b": [1, {"c": 10**320}]}},
)
_RAW = (b"1e999", b"NaN", b"-Infinity", b'"\\ud800"', b"[" * 300, b'{"a":' * 300, b"01", b'"\xff"', b"1" * 500, b"\0")
_HEADERS = (b"authorization", b"x-api-key", b"x-request-id", b"content-type", b"content-length", b"traceparent")


class _Http:
    """A message is three bytes (path, header name, length of the header's value), then that value, then the body."""

    def __init__(self, cluster: SmallCluster, keys: Keys, batches: BatchStore) -> None:
        router = cluster.router
        gateway = Gateway(
            router.intake,
            router.metrics.registry,
            router.readiness,
            max_body_bytes=_MAX_BODY,
            keys=keys,
            batches=batches,
            is_tracing=True,
        )
        self._app, self._cluster = gateway.app, cluster

    def malformed(self, random: Random) -> bytes:
        path = random.choice(_USUAL) if random.random() < 0.9 else random.randrange(len(_PATHS))
        if path == _UPLOAD_PATH:
            return bytes((path, 0, 0)) + change_bytes(_UPLOAD, random)
        body = json.dumps(_spoiled(_BODIES.get(path, _COMPLETION), random)).encode()
        if random.random() < 0.3:
            number = random.choice(_VALUES[12:22])
            body = body.replace(str(random.choice((2, 7, 1))).encode(), json.dumps(number).encode(), 1)
        if random.random() < 0.2:
            body = body.replace(b"null", random.choice(_RAW), 1).replace(b'""', random.choice(_RAW), 1)
        if random.random() < 0.3:
            body = change_bytes(body, random)
        header = b""
        if random.random() < 0.2:
            header = random.choice((b"Bearer " + _KEY.encode(), b"a b", b"\xff\xfe", b"x\n\ry", b"0" * 300, b"Bearer"))
        return bytes((path, random.randrange(len(_HEADERS)), len(header) % 256)) + header[:255] + body

    async def feed(self, message: bytes) -> str:
        path, name, length = (*message[:3], 0, 0, 0)[:3]
        headers = [(b"authorization", b"Bearer " + _KEY.encode())]
        if path % len(_PATHS) == _UPLOAD_PATH:
            headers.append((b"content-type", _UPLOAD_TYPE))
        if length:
            headers.insert(0, (_HEADERS[name % len(_HEADERS)], message[3 : 3 + length]))
        status = await self._ask(_PATHS[path % len(_PATHS)], headers, message[3 + length :])
        assert status < 500, f"status {status}"
        return str(status)

    async def _ask(self, path: str, headers: list[tuple[bytes, bytes]], body: bytes) -> int:
        requests: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]
        statuses: list[int] = []

        async def receive() -> dict[str, Any]:
            return requests.pop() if requests else {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(int(message["status"]))

        is_get = path.startswith(("/v1/models", "/health"))
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "GET" if is_get else "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        await self._app(scope, receive, send)
        return statuses[0]

    async def check(self) -> None:
        headers = [(b"authorization", b"Bearer " + _KEY.encode())]
        assert await self._ask("/v1/models", headers, b"") == 200
        assert await self._ask("/v1/models", [], b"") == 401
        await self._cluster.check()


def _spoiled(value: Any, random: Random) -> Any:
    """Returns the same JSON with a hostile value somewhere."""
    if isinstance(value, dict) and value and random.random() < 0.9:
        name = random.choice(list(value))
        changed = {**value, name: _spoiled(value[name], random)}
        if random.random() < 0.1:
            changed[random.choice(("nothing", "", "best_of", "suffix", "top_k"))] = random.choice(_VALUES)
        return changed
    if isinstance(value, list) and value and random.random() < 0.6:
        index = random.randrange(len(value))
        return [*value[:index], _spoiled(value[index], random), *value[index + 1 :]]
    return random.choice(_VALUES)


@asynccontextmanager
async def http(directory: Path) -> AsyncIterator[Edge]:
    path = directory / "keys"
    path.write_text(f"keys: [{{name: fuzz, key: {_KEY}}}]")
    path.chmod(0o600)
    async with small_cluster(directory) as cluster:
        yield _Http(cluster, Keys(path), BatchStore(directory / "batches", _MAX_FILES))
