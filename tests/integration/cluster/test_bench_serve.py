"""`octavo bench serve` over gRPC and HTTP, against a router and against a plain OpenAI server."""

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.bench.backends.base import Backend
from octavo.bench.backends.grpc_calls import GrpcBackend
from octavo.bench.backends.openai_http import OpenAIBackend
from octavo.bench.datasets.conversations import Conversations
from octavo.bench.datasets.request import BenchRequest
from octavo.bench.goodput import RequestLimits
from octavo.bench.serve import Load, measure
from octavo.client.errors import InvalidRequest, ModelNotFound, Unavailable
from octavo.reports import Report
from router.api.gateway.app import Gateway
from router.api.gateway.server import GatewayServer
from tests.fakes.openai_server import KEY, PlainServer, piece, running, two_in_an_event, usage
from tests.fakes.routers import running_router, running_schedulers, socket_address
from tests.fakes.scheduler import FakeScheduler
from tests.support.ports import free_port
from tests.support.up import COMMAND, environment

HOST = "127.0.0.1"
LOAD = Load(num_requests=6, rate=math.inf, concurrency=3, prompt_len=7, output_len=12, vocab_size=1000)


@pytest.fixture
async def scheduler(tmp_path: Path) -> AsyncIterator[FakeScheduler]:
    # Three tokens of a sequence come in each step, and so in each chunk.
    fake = FakeScheduler(socket_address(tmp_path, "one"), step_seconds=0.005, tokens_per_step=3)
    async with running_schedulers(fake):
        yield fake


@pytest.fixture
async def addresses(scheduler: FakeScheduler) -> AsyncIterator[tuple[str, str]]:
    """A router's gRPC target and HTTP URL."""
    async with running_router([scheduler.address]) as (server, _):
        await server.wait_ready()
        gateway = Gateway(server.intake, server.registry, server.readiness, max_body_bytes=100_000)
        serving = GatewayServer(gateway, HOST, 0)
        serving.start()
        yield f"{HOST}:{server.port}", f"http://{HOST}:{serving.port}"
        await serving.stop()


@pytest.fixture
async def plain() -> AsyncIterator[PlainServer]:
    async with running(PlainServer()) as server:
        yield server


async def _report(backend: Backend, load: Load = LOAD) -> Report:
    report = await measure(load, backend, lambda trace: None)
    assert [trace.error for trace in report.traces if trace.error] == []
    return report


async def test_all_backends_count_the_same_tokens(addresses: tuple[str, str], scheduler: FakeScheduler) -> None:
    target, url = addresses
    grpc_report = await _report(GrpcBackend(target))
    http_report = await _report(OpenAIBackend(f"{url}/v1/", is_chat=False))
    prompts = list(scheduler.prompts.values())
    assert sorted(prompts[:6]) == sorted(prompts[6:])
    for report in (grpc_report, http_report):
        shown = report.as_json()
        assert (shown["engine"], shown["model"], shown["prompt_len"]) == ("octavo", "test-model", 7)
        assert (shown["num_requests"], shown["num_errors"]) == (6, 0)
        for trace in report.traces:
            assert trace.num_tokens == 12
            # Several tokens of an event are counted, and the time before it is spread over them.
            assert max(trace.token_counts) >= 3
            assert len(trace.itl) == 12 - trace.token_counts[0]
    assert http_report.extra["tokens_counted_by"] == "usage"

    chat = await _report(OpenAIBackend(url, is_chat=True))
    assert {trace.num_tokens for trace in chat.traces} == {12}
    # Only the server knows how many tokens seven words are.
    assert int(str(chat.as_json()["prompt_len"])) > 7


async def test_token_ids_tell_the_tokens_if_a_server_sends_them(addresses: tuple[str, str]) -> None:
    backend = OpenAIBackend(addresses[1], is_chat=False, extra_body={"return_token_ids": True, "stream_options": None})
    report = await _report(backend)
    assert report.extra["tokens_counted_by"] == "token_ids"
    assert {trace.num_tokens for trace in report.traces} == {12}


async def test_a_load_that_cannot_be_is_refused_over_http(addresses: tuple[str, str]) -> None:
    with pytest.raises(InvalidRequest, match="exceed max_model_len=2048"):
        await measure(replace(LOAD, output_len=3000), OpenAIBackend(addresses[1], is_chat=False), lambda trace: None)
    report = await measure(LOAD, OpenAIBackend(addresses[1], is_chat=False, model="other"), lambda trace: None)
    assert all("model='other' is not served here" in trace.error for trace in report.traces)
    with pytest.raises(Unavailable, match=r"--base-url http://127\.0\.0\.1"):
        await measure(LOAD, OpenAIBackend(f"http://{HOST}:{free_port()}", is_chat=False), lambda trace: None)


@pytest.mark.parametrize("is_chat", [False, True], ids=["completions", "chats"])
async def test_a_plain_server_gets_plain_requests(plain: PlainServer, is_chat: bool) -> None:
    report = await _report(OpenAIBackend(plain.url, is_chat=is_chat, api_key=KEY))
    expected = {"engine": "someone", "model": "plain", "num_errors": 0, "prompt_len": 9}
    assert expected.items() <= report.as_json().items()
    # An event has two tokens: those at the end's usage, spread over the events.
    assert [trace.token_counts for trace in report.traces] == [[2] * 6] * 6
    assert report.extra["tokens_counted_by"] == "usage"
    assert len(plain.bodies) == 6
    for body in plain.bodies:
        shape = body["messages"][0]["content"] if is_chat else body["prompt"]
        assert len(shape.split() if is_chat else shape) == 7


async def test_text_and_fields_of_ones_own(plain: PlainServer) -> None:
    backend = OpenAIBackend(
        plain.url, is_chat=False, api_key=KEY, takes_text=True, extra_body={"stream_options": None, "temperature": 0}
    )
    report = await measure(LOAD, backend, lambda trace: None)
    assert all("Unrecognized request argument: temperature" in trace.error for trace in report.traces)
    keyless = await measure(LOAD, OpenAIBackend(plain.url, is_chat=False), lambda trace: None)
    assert keyless.as_json()["num_errors"] == 6
    assert "status 401" in keyless.traces[0].error
    with pytest.raises(ModelNotFound, match="name one with --model"):
        await measure(LOAD, OpenAIBackend(f"{plain.url}/nowhere", is_chat=False), lambda trace: None)


async def test_a_kept_connection_that_the_server_closes_costs_no_request() -> None:
    """As llama-server does. Each connection answers one request, and closes at the next one."""
    event = {"choices": [{"text": "a", "finish_reason": "stop"}], "usage": usage(1)}
    body = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode()
    connections: list[asyncio.Task[Any] | None] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(asyncio.current_task())
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(body))
        writer.write(body)
        with contextlib.suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(answer, HOST, 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with OpenAIBackend(f"http://{HOST}:{port}", is_chat=False, model="m") as backend:
            traces = [await backend.complete("x", 0, 1) for _ in range(3)]
        assert [(trace.error, trace.num_tokens) for trace in traces] == [("", 1)] * 3
        assert len(connections) == 3
        await asyncio.gather(*(task for task in connections if task is not None))


def _broken(num_tokens: int, is_chat: bool) -> list[dict[str, Any]]:
    return [piece("a", is_chat=is_chat), {"error": {"message": "out of memory"}}]


def _cut(num_tokens: int, is_chat: bool) -> list[dict[str, Any]]:
    return two_in_an_event(num_tokens, is_chat)[:2]


def _empty(num_tokens: int, is_chat: bool) -> list[dict[str, Any]]:
    return [piece("", is_chat=is_chat, finish="stop", usage=usage(0))]


@pytest.mark.parametrize(
    ("events", "words"),
    [(_broken, "out of memory"), (_cut, "without a finish_reason"), (_empty, "no output token came")],
)
async def test_a_stream_that_fails_is_an_error(events: Any, words: str) -> None:
    async with running(PlainServer(events)) as server:
        report = await measure(LOAD, OpenAIBackend(server.url, is_chat=False, api_key=KEY), lambda trace: None)
    assert all(words in trace.error for trace in report.traces)
    assert report.as_json()["output_tok_s"] == 0


async def test_the_command_measures_any_server(plain: PlainServer) -> None:
    async def octavo(*flags: str, key: str = KEY) -> tuple[int | None, str, str]:
        command = [*COMMAND, "bench", "serve", "--base-url", plain.url, "--num-requests=4", "--output-len=6", *flags]
        process = await asyncio.create_subprocess_exec(
            *command, env=environment(OCTAVO_API_KEY=key), stdout=-1, stderr=-1
        )
        out, err = await asyncio.wait_for(process.communicate(), 60)
        return process.returncode, out.decode(), err.decode()

    code, out, err = await octavo("--backend=openai-chat", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert {"engine": "someone", "api": "http", "num_errors": 0, "num_requests": 4}.items() <= report.items()
    assert 0 < report["ttft_s_p50"] <= report["e2e_s_p50"]
    code, out, _ = await octavo("--backend=openai", key="wrong")
    assert code == 1
    assert "plain, 128 in / 6 out" in out
    code, _, err = await octavo("--backend=openai", "--extra-body=[1]")
    assert code == 2
    assert "is not a JSON object" in err


async def test_texts_of_a_file_go_over_every_backend(
    addresses: tuple[str, str], scheduler: FakeScheduler, tmp_path: Path
) -> None:
    """Requests that the model can't take are left out and counted; goodput counts those within the limits."""
    entries = [{"prompt": "some words to be answered " * n, "output_tokens": 6 * n} for n in (1, 2, 1000)]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, entries)))
    dataset = Conversations(path=tmp_path / "texts.jsonl")
    load = Load(num_requests=10, dataset=dataset, limits=RequestLimits(ttft=60.0, e2e=1e-6))
    target, url = addresses
    for backend in (GrpcBackend(target), OpenAIBackend(url, is_chat=False), OpenAIBackend(url, is_chat=True)):
        report = await _report(backend, load)
        assert sorted(trace.num_tokens for trace in report.traces) == [6, 12]
        expected = {"dataset": "sharegpt", "num_too_long": 1, "good_share": 0.0, "output_len": 9}
        assert expected.items() <= report.as_json().items()
        # As the router counted them.
        assert int(str(report.as_json()["prompt_len"])) > 5


async def test_requests_are_sent_at_the_times_of_their_dataset(addresses: tuple[str, str]) -> None:
    class Twice:
        name, is_drawn = "two", False

        def requests(self, count: int, seed: int, *, vocab_size: int, as_text: bool) -> list[BenchRequest]:
            return [BenchRequest(prompt=[1, 2], prompt_len=2, output_len=3, at=at) for at in (0.0, 1.0)]

    report = await _report(GrpcBackend(addresses[0]), Load(num_requests=2, dataset=Twice(), speed=5.0))
    first, second = sorted(trace.began for trace in report.traces)
    assert second - first >= 0.19
