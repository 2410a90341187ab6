"""Streams over HTTP that outlive their connection: GET /v1/streams/ID goes on behind Last-Event-ID."""

import asyncio
import contextlib
import json
import random
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from protos import inference_pb2 as pb
from router.api.gateway.app import Gateway
from router.api.gateway.server import GatewayServer
from router.server import RouterServer
from tests.fakes.routers import running_router, running_schedulers, socket_address
from tests.fakes.scheduler import FakeScheduler, hashed_token

HOST = "127.0.0.1"
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")


@pytest.fixture
async def scheduler(tmp_path: Path) -> AsyncIterator[FakeScheduler]:
    # Anthropic's API has no seeds.
    fake = FakeScheduler(
        socket_address(tmp_path, "one"),
        next_token=lambda ids, num_prompt, _, choice: hashed_token(ids, num_prompt, 0, choice),
    )
    async with running_schedulers(fake):
        yield fake


@pytest.fixture
async def router(scheduler: FakeScheduler) -> AsyncIterator[tuple[RouterServer, Any]]:
    async with running_router([scheduler.address]) as (server, stub):
        await server.wait_ready()
        yield server, stub


@pytest.fixture
async def http(router: tuple[RouterServer, Any]) -> AsyncIterator[httpx.AsyncClient]:
    async with _serving(router[0]) as client:
        yield client


@contextlib.asynccontextmanager
async def _serving(server: RouterServer) -> AsyncIterator[httpx.AsyncClient]:
    gateway = Gateway(
        server.intake,
        server.registry,
        server.readiness,
        max_body_bytes=100_000,
        keys=server.keys,
        attachments=server.attachments,
    )
    serving = GatewayServer(gateway, HOST, 0)
    serving.start()
    async with httpx.AsyncClient(base_url=f"http://{HOST}:{serving.port}", timeout=30) as client:
        yield client
    await serving.stop()


def _body(path: str, *, max_tokens: int = 40, **fields: Any) -> dict[str, Any]:
    said = [{"role": "user", "content": "Once upon a time"}]
    body = {
        "/v1/completions": {"prompt": "Once upon", "seed": 5, "max_tokens": max_tokens},
        "/v1/chat/completions": {"messages": said, "seed": 5, "max_tokens": max_tokens},
        "/v1/messages": {"messages": said, "temperature": 0, "max_tokens": max_tokens},
        "/v1/responses": {"input": said, "seed": 5, "max_output_tokens": max_tokens},
    }[path]
    return {**body, "stream": True, **fields}


@dataclass
class _Events:
    """A client's part of a stream: the data of its events, by id."""

    ids: list[str] = field(default_factory=list)
    datas: list[str] = field(default_factory=list)
    headers: httpx.Headers = field(default_factory=httpx.Headers)

    async def read(
        self, response: httpx.Response, at_most: int = 10**6, lines: AsyncIterator[str] | None = None
    ) -> bool:
        """Reads events; True if the stream ended before `at_most` had come. lines: the response's, to read it in
        parts."""
        assert response.status_code == 200, await response.aread()
        self.headers, event = response.headers, dict[str, str]()
        async for line in lines or response.aiter_lines():
            if line:
                name, _, value = line.partition(": ")
                event[name] = value
            elif "data" in event:
                self.ids.append(event.get("id", ""))
                self.datas.append(event["data"])
                event = {}
                at_most -= 1
                if not at_most:
                    return False
        return True

    @property
    def text(self) -> str:
        """The output, whichever API it came by."""
        parsed = [json.loads(data) for data in self.datas if data != "[DONE]"]
        parts = []
        for each in parsed:
            if "choices" in each:
                parts += [
                    choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in each["choices"]
                ]
            elif each["type"] == "content_block_delta":
                parts.append(each["delta"]["text"])
            elif each["type"] == "response.output_text.delta":
                parts.append(each["delta"])
        return "".join(parts)


async def _begin(http: httpx.AsyncClient, path: str, body: dict[str, Any], at_most: int = 10**6) -> _Events:
    events = _Events()
    headers = {"x-request-id": body.pop("id", "a")}
    async with http.stream("POST", path, json=body, headers=headers) as response:
        await events.read(response, at_most)
    return events


async def _go_on(http: httpx.AsyncClient, events: _Events, at_most: int = 10**6, request_id: str = "a") -> bool:
    last = {"last-event-id": events.ids[-1]} if events.ids else {}
    async with http.stream("GET", f"/v1/streams/{request_id}", headers=last) as response:
        if response.status_code == 204:
            return True
        return await events.read(response, at_most)


@pytest.mark.parametrize("path", PATHS)
async def test_a_client_goes_on_behind_the_last_event_that_has_come(
    http: httpx.AsyncClient, scheduler: FakeScheduler, path: str
) -> None:
    whole = await _begin(http, path, _body(path, id="whole"))
    assert set(whole.ids) == {""}, "events have ids though nobody asked for a stream that lasts"
    scheduler.step_seconds = 0.002
    events = await _begin(http, path, _body(path, detach_timeout=60), 5)
    assert events.headers["x-request-id"] == "a"
    for at_most in (1, 7, 10**6):
        await _go_on(http, events, at_most)
    assert await _go_on(http, events), "a stream that has been read to its end answers 204"
    assert events.ids == [str(number) for number in range(1, len(events.ids) + 1)]
    assert events.text == whole.text
    # From the beginning.
    again = _Events()
    await _go_on(http, again)
    assert (again.ids, again.datas) == (events.ids, events.datas)


async def test_several_prompts_are_one_stream(http: httpx.AsyncClient, scheduler: FakeScheduler) -> None:
    body = _body("/v1/completions", detach_timeout=60)
    body["prompt"] = ["Once upon", "A time"]
    scheduler.step_seconds = 0.002
    events = await _begin(http, "/v1/completions", body, 5)
    await _go_on(http, events)
    choices = [choice for data in events.datas[:-1] for choice in json.loads(data)["choices"]]
    assert {choice["index"] for choice in choices if choice["finish_reason"]} == {0, 1}
    assert events.datas[-1] == "[DONE]"


async def test_the_request_goes_on_without_its_client(
    http: httpx.AsyncClient, scheduler: FakeScheduler, router: tuple[RouterServer, Any]
) -> None:
    server, _ = router
    scheduler.step_seconds = 0.001
    events = await _begin(http, PATHS[1], _body(PATHS[1], max_tokens=300, detach_timeout=60), 1)
    await server.streams.wait_empty()
    assert not scheduler.cancelled
    await _go_on(http, events)
    assert json.loads(events.datas[-2])["choices"][0]["finish_reason"] == "length"


async def test_of_two_readers_the_later_one_has_the_stream(http: httpx.AsyncClient, scheduler: FakeScheduler) -> None:
    scheduler.pause_at = 3
    first, second = _Events(), _Events()
    body = _body(PATHS[1], max_tokens=6, detach_timeout=60)
    async with http.stream("POST", PATHS[1], json=body, headers={"x-request-id": "a"}) as response:
        lines = response.aiter_lines()
        assert not await first.read(response, 1, lines)
        async with http.stream("GET", "/v1/streams/a") as other:
            other_lines = other.aiter_lines()
            assert not await second.read(other, 1, other_lines)
            assert await first.read(response, lines=lines)
            assert "another reader has attached" in first.datas[-1]
            assert first.ids[-1] == ""
            scheduler.pause_at = None
            assert await second.read(other, lines=other_lines)
    assert second.datas[-1] == "[DONE]"
    assert second.ids == [str(number) for number in range(1, len(second.ids) + 1)]


async def test_what_cannot_be_read_is_refused_by_name(
    http: httpx.AsyncClient, scheduler: FakeScheduler, router: tuple[RouterServer, Any]
) -> None:
    _, stub = router
    scheduler.pause_at = 3
    await _begin(http, PATHS[1], _body(PATHS[1], detach_timeout=60), 2)

    async def refusal(path: str, last: str = "0") -> tuple[int, str]:
        answer = await http.get(path, headers={"last-event-id": last})
        return answer.status_code, answer.json()["error"]["message"]

    assert (await refusal("/v1/streams/b"))[0] == 404
    status, message = await refusal("/v1/streams/a", "99")
    # More may have been sent than this client has read.
    assert re.fullmatch(r"Last-Event-ID=99, but only [2-5] events have been sent", message), message
    assert status == 400
    status, message = await refusal("/v1/streams/a", "x")
    assert (status, message.startswith("Last-Event-ID='x'")) == (400, True)
    for seconds in (-1, 3601):
        answer = await http.post(PATHS[1], json=_body(PATHS[1], detach_timeout=seconds))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "detach_timeout")
    answer = await http.post(PATHS[1], json=_body(PATHS[1], detach_timeout=1) | {"stream": False})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "detach_timeout")
    # Each protocol names the other.
    with pytest.raises(grpc.aio.AioRpcError, match="GET /v1/streams/a"):
        await stub.Attach(pb.AttachRequest(request_id="a")).read()
    call = stub.Generate(pb.GenerateRequest(request_id="g", prompt="Hi", detach_timeout=60))
    await call.read()
    assert (await refusal("/v1/streams/g"))[1].endswith("call Attach there")


async def test_another_keys_stream_is_not_found(scheduler: FakeScheduler, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.touch(mode=0o600)
    keys.write_text("keys:\n  - {name: t, key: a-long-enough-key}\n  - {name: u, key: another-long-key}\n")
    own, foreign = ({"authorization": f"Bearer {key}"} for key in ("a-long-enough-key", "another-long-key"))
    scheduler.pause_at = 3
    async with running_router([scheduler.address], api_keys_file=str(keys)) as (server, _):
        await server.wait_ready()
        async with _serving(server) as http:
            http.headers.update(own)
            events = await _begin(http, PATHS[1], _body(PATHS[1], max_tokens=6, detach_timeout=60), 2)
            for method in ("GET", "DELETE"):
                assert (await http.request(method, "/v1/streams/a", headers=foreign)).status_code == 404, method
            scheduler.pause_at = None
            assert await _go_on(http, events)
            assert events.datas[-1] == "[DONE]"


async def test_delete_ends_a_stream(http: httpx.AsyncClient, scheduler: FakeScheduler) -> None:
    scheduler.pause_at = 3
    await _begin(http, PATHS[0], _body(PATHS[0], detach_timeout=60), 1)
    answer = await http.delete("/v1/streams/a")
    assert (answer.status_code, answer.json()["deleted"]) == (200, True)
    await scheduler.wait_until(lambda each: each.num_live == 0)
    assert (await http.delete("/v1/streams/a")).status_code == 404


async def test_an_id_that_is_live_is_not_taken_twice(http: httpx.AsyncClient, scheduler: FakeScheduler) -> None:
    scheduler.pause_at = 3
    await _begin(http, PATHS[0], _body(PATHS[0], detach_timeout=60), 1)
    assert (await http.post(PATHS[0], json=_body(PATHS[0]), headers={"x-request-id": "a"})).status_code == 409
    both = _body(PATHS[0], detach_timeout=60) | {"prompt": ["Once", "upon"]}
    assert (await http.post(PATHS[0], json=both, headers={"x-request-id": "a"})).status_code == 409
    await scheduler.wait_until(lambda each: each.num_live == 1)


async def test_cut_at_random_every_output_is_whole(http: httpx.AsyncClient, scheduler: FakeScheduler) -> None:
    draw = random.Random(3)
    scheduler.step_seconds = 0.002

    async def one(number: int) -> str:
        body = _body(PATHS[1], detach_timeout=60, id=str(number)) | {"seed": number}
        events = await _begin(http, PATHS[1], body, draw.randrange(1, 10))
        while events.datas[-1] != "[DONE]":
            await _go_on(http, events, draw.randrange(1, 20), str(number))
        return events.text

    outputs = await asyncio.gather(*map(one, range(20)))
    scheduler.step_seconds = 0
    for number, output in enumerate(outputs):
        body = _body(PATHS[1], id=f"again-{number}") | {"seed": number}
        assert (await _begin(http, PATHS[1], body)).text == output
