"""The HTTP bodies that a router holds, how long, and how callers share the room; a fake scheduler computes."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from protos import inference_pb2 as pb
from router.api.gateway.app import Gateway
from router.api.gateway.openai.chat import ChatReply
from router.api.gateway.openai.completion import CompletionReply
from router.api.gateway.openai.form import Form
from router.api.gateway.server import GatewayServer
from tests.fakes.routers import running_router, running_schedulers, smollm2_tokenizer, socket_address
from tests.fakes.scheduler import FakeScheduler

HOST, PATH = "127.0.0.1", "/v1/completions"
ALL_BODIES = 100_000
BODY = json.dumps({"prompt": "x", "max_tokens": 1, "temperature": 0}).encode()


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[GatewayServer]:
    fake = FakeScheduler(socket_address(tmp_path, "one"))
    async with running_schedulers(fake), running_router([fake.address]) as (server, _):
        await server.wait_ready()
        gateway = Gateway(
            server.intake,
            server.metrics.registry,
            server.readiness,
            max_body_bytes=2**24,
            max_bodies_bytes=ALL_BODIES,
        )
        http = GatewayServer(gateway, HOST, 0)
        http.start()
        yield http
        await http.stop()


async def _begin(http: GatewayServer, size: int, sent: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Begins a request with so many bytes of body, and sends as many of them."""
    reader, writer = await asyncio.open_connection(HOST, http.port)
    writer.write(f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {size}\r\n\r\n".encode() + b" " * sent)
    await writer.drain()
    return reader, writer


async def _post(http: GatewayServer, body: bytes) -> httpx.Response:
    async with httpx.AsyncClient(base_url=f"http://{HOST}:{http.port}", timeout=30) as client:
        return await client.post(PATH, content=body)


async def _until_status(http: GatewayServer, body: bytes, status: int) -> httpx.Response:
    for _ in range(500):
        if (reply := await _post(http, body)).status_code == status:
            return reply
        await asyncio.sleep(0.01)
    pytest.fail(f"no answer has status {status}")


async def test_bodies_have_one_budget_that_callers_share(http: GatewayServer) -> None:
    """100 slow uploads of 64 MiB used to hold 6.4 GB."""
    padded = BODY + b" " * 60_000
    assert (await _post(http, padded)).status_code == 429, "one caller gets half of all at most"
    reply = await _post(http, BODY + b" " * 40_000)
    assert reply.status_code == 200

    _, slow = await _begin(http, size=50_000, sent=45_000)
    reply = await _until_status(http, BODY + b" " * 30_000, 429)
    assert "max_bodies_bytes=100000" in reply.json()["error"]["message"]
    assert float(reply.headers["retry-after"]) > 0
    assert (await _post(http, BODY)).status_code == 200, "small bodies find room"

    slow.close()
    await slow.wait_closed()
    await _until_status(http, BODY + b" " * 30_000, 200)


async def test_a_client_that_leaves_within_its_body_is_no_error(
    http: GatewayServer, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(20):
        _, writer = await _begin(http, size=45_000, sent=40_000)
        writer.close()
        await writer.wait_closed()
    await _until_status(http, BODY + b" " * 40_000, 200)
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


async def test_a_body_has_a_deadline(http: GatewayServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.api.gateway.reading.bodies.BODY_S", 0.2)
    reader, writer = await _begin(http, size=1000, sent=10)
    assert b" 408 " in await reader.readline()
    writer.close()


async def test_a_chat_has_no_more_bytes_than_its_model_can_use(http: GatewayServer) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 10_000_000}]}).encode()
    async with httpx.AsyncClient(base_url=f"http://{HOST}:{http.port}", timeout=30) as client:
        reply = await client.post("/v1/chat/completions", content=body)
    assert reply.status_code == 413
    assert "the most that a chat of this model can use" in reply.json()["error"]["message"]


async def test_large_json_is_parsed_beside_the_event_loop(tmp_path: Path) -> None:
    """21 MB of empty lists used to take 2.0 s and 662 MB on the event loop."""
    fake = FakeScheduler(socket_address(tmp_path, "one"))
    lists = b'{"prompt": "x", "max_tokens": 1, "unknown": [' + b"[]," * 1_300_000 + b"[]]}"
    deep = b'{"prompt": "x", "max_tokens": 1, "unknown": ' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}"
    gaps: list[float] = []

    async def tick() -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.001)
            gaps.append(time.monotonic() - last)
            last = time.monotonic()

    async with running_schedulers(fake), running_router([fake.address]) as (server, _):
        await server.wait_ready()
        gateway = Gateway(server.intake, server.metrics.registry, server.readiness, max_body_bytes=2**24)
        http = GatewayServer(gateway, HOST, 0)
        http.start()
        ticking = asyncio.create_task(tick())
        replies = [await _post(http, body) for body in (lists, deep, BODY, b"[]," * (2**21 + 1))]
        ticking.cancel()
        await http.stop()
    assert [reply.status_code for reply in replies] == [200, 400, 200, 400]
    assert replies[0].headers["x-octavo-ignored-fields"] == "unknown"
    assert "recursion" in replies[1].json()["error"]["message"]
    assert "values: use at most" in replies[3].json()["error"]["message"]
    assert max(gaps) < 1.0


def test_a_streamed_reply_keeps_nothing() -> None:
    """It used to keep all text and logprobs, outside stream_buffer_bytes."""
    form = Form(is_stream=True, has_usage_chunk=True, num_logprobs=1, has_token_ids=True)
    table = smollm2_tokenizer()
    base = {"id": "a", "created": 0, "model": "m"}
    token = pb.TokenLogprob(token_id=1, token=b"word", logprob=-1.0)
    event = pb.GenerateResponse(
        chunk=pb.Chunk(text="word", token_ids=[1], logprobs=[pb.TokenLogprobs(chosen=token, top=[token])])
    )
    for reply in (CompletionReply(form, base, 1, [], table), ChatReply(form, base, table)):
        assert reply.take(0, event) is not None
        before = len(repr(reply.__dict__))
        for _ in range(100):
            assert reply.take(0, event) is not None
        # Numbers grow by a byte or two.
        assert len(repr(reply.__dict__)) < before + 100
