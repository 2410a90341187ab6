"""Answers that come whole, of all services: in parts, within bounds, and with their room given back."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from protos import inference_pb2 as pb
from protos.inference_pb2_grpc import InferenceStub
from router.api.encoded import PART_BYTES
from router.api.gateway.app import Gateway
from router.api.gateway.batches.store import BatchStore
from router.api.gateway.server import GatewayServer
from router.streams.whole_answers import WholeAnswers
from tests.fakes.routers import running_router, running_schedulers, socket_address
from tests.fakes.scheduler import FakeScheduler

HOST = "127.0.0.1"
ROOM = 4 * 2**20
COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
# 5,880 logprobs, and 42,000, which are refused.
LARGE: dict[str, Any] = {"prompt": "x", "n": 2, "max_tokens": 140, "logprobs": 20, "seed": 1, "ignore_eos": True}
TOO_LARGE = {**LARGE, "n": 20, "max_tokens": 100}
LIKELY = [(1000 + i, -0.123456 * i) for i in range(20)]


class Server:
    """A router with little room for whole answers, over HTTP and gRPC."""

    def __init__(
        self, scheduler: FakeScheduler, http: GatewayServer, stub: InferenceStub, answers: WholeAnswers
    ) -> None:
        self.scheduler, self.http, self.stub, self.answers = scheduler, http, stub, answers
        self.client = httpx.AsyncClient(base_url=f"http://{HOST}:{http.port}", timeout=60)

    async def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return await self.client.post(path, json=body)

    async def begin(self, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Asks for a completion over a connection of its own."""
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        # Little on its way: what is not read waits in the router.
        for each, name in ((self.http._socket, socket.SO_SNDBUF), (connection, socket.SO_RCVBUF)):
            each.setsockopt(socket.SOL_SOCKET, name, 4096)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (HOST, self.http.port))
        reader, writer = await asyncio.open_connection(sock=connection, limit=1024)
        data = json.dumps(body).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()
        return reader, writer

    async def until_free(self) -> None:
        await until(lambda: not self.answers.shared.total)


async def until(condition: Callable[[], object]) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("it does not come")


async def left(writer: asyncio.StreamWriter) -> None:
    """Leaves, as a client that is killed."""
    writer.transport.abort()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    fake = FakeScheduler(socket_address(tmp_path, "one"), likely=lambda token_ids: LIKELY)
    async with running_schedulers(fake), running_router([fake.address], max_answers_bytes=ROOM) as (router, stub):
        await router.wait_ready()
        gateway = Gateway(
            router.intake,
            router.registry,
            router.readiness,
            max_body_bytes=100_000,
            batches=BatchStore(tmp_path / "batches", 2**30),
        )
        http = GatewayServer(gateway, HOST, 0)
        http.start()
        served = Server(fake, http, stub, router.intake.answers)
        yield served
        await served.client.aclose()
        await http.stop()


def _is_kept(answers: WholeAnswers, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list of the bytes that are held whenever an answer takes more."""
    held: list[int] = []
    take = answers.shared.take

    def noted(caller: str, amount: int, weight: float = 1.0) -> bool:
        is_taken = take(caller, amount, weight)
        held.append(answers.shared.total)
        return is_taken

    monkeypatch.setattr(answers.shared, "take", noted)
    return held


async def test_a_large_answer_is_what_its_stream_adds_up_to(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    held = _is_kept(server.answers, monkeypatch)
    reply = await server.post(COMPLETIONS, LARGE)
    assert reply.status_code == 200
    assert int(reply.headers["content-length"]) == len(reply.content) > 2 * PART_BYTES
    assert reply.headers["content-type"] == "application/json"
    whole = reply.json()
    streamed: dict[int, dict[str, Any]] = {}
    async with server.client.stream("POST", COMPLETIONS, json={**LARGE, "stream": True}) as stream:
        async for line in stream.aiter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                known = streamed.setdefault(choice["index"], {"text": "", **{name: [] for name in choice["logprobs"]}})
                known["text"] += choice["text"]
                for name, values in choice["logprobs"].items():
                    known[name] += values
    for choice in whole["choices"]:
        assert {"text": choice["text"], **choice["logprobs"]} == streamed[choice["index"]]
    # It was counted while it grew, not at the end.
    assert len(held) >= 2
    assert held == sorted(held)
    assert held[-1] <= len(reply.content)
    await server.until_free()


async def test_parts_are_sent_as_they_are_read(server: Server) -> None:
    """The whole body used to go to the connection at once, which held the event loop and kept its memory."""
    body = {**LARGE, "n": 8, "max_tokens": 400, "logprobs": 4}
    size = len((await server.post(COMPLETIONS, body)).content)
    await server.until_free()
    reader, writer = await server.begin(body)
    await reader.readuntil(b"\r\n\r\n")
    others = [(await server.client.get("/health")).status_code for _ in range(3)]
    assert others == [200] * 3
    assert size // 2 < server.answers.shared.total < size, "what is not read is kept, and counted"
    received = 0
    while received < size:
        received += len(await reader.read(65_536))
    assert received == size
    await left(writer)
    await server.until_free()


async def test_a_client_that_reads_nothing_gives_its_room_back(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("router.streams.outbox.UNREAD_S", 0.3)
    caplog.set_level("INFO", "octavo.router.gateway")
    _, writer = await server.begin({**LARGE, "n": 8, "max_tokens": 150})
    await until(lambda: "its answer ends" in caplog.text)
    await server.until_free()
    await left(writer)


async def test_a_client_that_leaves_gives_its_room_back(server: Server) -> None:
    server.scheduler.pause_at = 100
    _, writer = await server.begin(LARGE)
    await until(lambda: server.answers.shared.total)
    await left(writer)
    await server.until_free()
    await server.scheduler.wait_until(lambda fake: not fake.num_live)


async def test_an_answer_that_fails_gives_its_room_back_and_sets_the_status(server: Server) -> None:
    server.scheduler.pause_at = 100
    _, writer = await server.begin({**LARGE, "n": 1})
    asked = asyncio.create_task(server.post(COMPLETIONS, LARGE))
    await until(lambda: server.answers.shared.total)
    server.scheduler.is_broken = True
    await server.scheduler.resume_steps()
    reply = await asked
    assert (reply.status_code, reply.json()["error"]["type"]) == (500, "server_error")
    await left(writer)
    await server.until_free()


async def test_an_answer_that_could_never_fit_is_refused_before_it_is_computed(server: Server) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 20}
    response = {"input": "x", "top_logprobs": 20, "include": ["message.output_text.logprobs"]}
    for path, body in (
        (COMPLETIONS, TOO_LARGE),
        (CHATS, {**chat, "n": 20, "max_tokens": 100}),
        (RESPONSES, {**response, "max_output_tokens": 2000}),
    ):
        reply = await server.post(path, body)
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, "n"), reply.text
        assert "logprobs=20" in error["message"]
        assert "stream=true" in error["message"]
    assert not server.scheduler.submitted
    async with server.client.stream("POST", COMPLETIONS, json={**TOO_LARGE, "stream": True}) as stream:
        assert stream.status_code == 200
    # Its max_tokens is open: it ends when it is too long.
    reply = await server.post(CHATS, {**chat, "n": 4, "ignore_eos": True})
    assert reply.status_code == 400
    assert "the answer has more than 2097152 bytes" in reply.json()["error"]["message"]
    await server.until_free()


async def test_an_answer_that_finds_no_room_is_told_to_come_again(server: Server) -> None:
    server.answers.shared.add("another", ROOM - 100_000)
    reply = await server.post(COMPLETIONS, LARGE)
    error = reply.json()["error"]
    assert (reply.status_code, error["type"]) == (429, "rate_limit_error")
    assert f"max_answers_bytes={ROOM}" in error["message"]
    assert float(reply.headers["retry-after"]) > 0
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await server.stub.GenerateUnary(_request(n=4, max_tokens=140))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    small = {**LARGE, "n": 1, "max_tokens": 5}
    assert (await server.post(COMPLETIONS, small)).status_code == 200, "small answers always find room"
    async with server.client.stream("POST", COMPLETIONS, json={**LARGE, "stream": True}) as stream:
        assert "[DONE]" in (await stream.aread()).decode(), "streams do not need it"
    assert server.answers.shared.total == ROOM - 100_000
    server.answers.shared.give_back("another", ROOM - 100_000)
    assert (await server.post(COMPLETIONS, LARGE)).status_code == 200


def _request(n: int, max_tokens: int) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(n=n, max_tokens=max_tokens, logprobs=20, seed=1, ignore_eos=True)
    return pb.GenerateRequest(prompt="x", sampling=sampling)


async def test_a_unary_call_answers_with_what_its_stream_adds_up_to(server: Server) -> None:
    result = await server.stub.GenerateUnary(_request(n=2, max_tokens=140))
    logprobs: dict[int, list[pb.TokenLogprobs]] = {0: [], 1: []}
    texts = {0: "", 1: ""}
    async for event in server.stub.Generate(_request(n=2, max_tokens=140)):
        texts[event.chunk.index] += event.chunk.text
        logprobs[event.chunk.index] += event.chunk.logprobs
    assert {choice.index: choice.text for choice in result.choices} == texts
    assert {choice.index: list(choice.logprobs) for choice in result.choices} == logprobs
    assert result.usage.completion_tokens == 280
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await server.stub.GenerateUnary(_request(n=50, max_tokens=200))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    told = caught.value.details() or ""
    assert told.startswith("sampling.n=50 with max_tokens=200 and logprobs=20")
    assert "Generate" in told
    await server.until_free()


async def test_a_response_that_is_stored_and_streamed_has_its_logprobs(server: Server) -> None:
    asked = {"input": "x", "top_logprobs": 20, "include": ["message.output_text.logprobs"], "max_output_tokens": 100}
    whole = (await server.post(RESPONSES, asked)).json()
    stored = (await server.client.get(f"{RESPONSES}/{whole['id']}")).json()
    assert stored == whole
    assert len(whole["output"][0]["content"][0]["logprobs"]) == whole["usage"]["output_tokens"] > 9
    events: list[dict[str, Any]] = []
    async with server.client.stream("POST", RESPONSES, json={**asked, "stream": True}) as stream:
        async for line in stream.aiter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line.removeprefix("data: ")))
    last = events[-1]["response"]
    deltas = [each for event in events if event["type"].endswith("text.delta") for each in event["logprobs"]]
    (done,) = (event for event in events if event["type"] == "response.output_text.done")
    assert last["output"][0]["content"][0]["logprobs"] == done["logprobs"] == deltas
    await server.until_free()


async def test_a_batch_has_large_answers_on_one_line(server: Server) -> None:
    lines = [
        {"custom_id": name, "method": "POST", "url": COMPLETIONS, "body": body}
        for name, body in (("large", {**LARGE, "n": 4, "max_tokens": 200}), ("too large", TOO_LARGE))
    ]
    data = "\n".join(map(json.dumps, lines)).encode()
    file = (await server.client.post("/v1/files", files={"file": ("in", data)}, data={"purpose": "batch"})).json()
    asked = {"input_file_id": file["id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
    batch = (await server.post("/v1/batches", asked)).json()
    async with asyncio.timeout(120):
        while batch["status"] not in ("completed", "failed"):
            await asyncio.sleep(0.05)
            batch = (await server.client.get(f"/v1/batches/{batch['id']}")).json()
    (line,) = (await server.client.get(f"/v1/files/{batch['output_file_id']}/content")).text.splitlines()
    answer = json.loads(line)["response"]
    assert len(line) > 2**18
    assert answer["status_code"] == 200
    direct = (await server.post(COMPLETIONS, {**LARGE, "n": 4, "max_tokens": 200})).json()
    assert answer["body"]["choices"] == direct["choices"]
    (refused,) = (await server.client.get(f"/v1/files/{batch['error_file_id']}/content")).text.splitlines()
    assert json.loads(refused)["response"]["status_code"] == 400
    await server.until_free()
