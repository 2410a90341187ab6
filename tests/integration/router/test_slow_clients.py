"""Clients that send requests slowly or not at all lose their connection, and no other client waits for them."""

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest

from router.api.gateway.app import Gateway
from router.api.gateway.reading import bodies
from router.api.gateway.server import GatewayServer
from router.api.http import connection
from tests.fakes.routers import running_router, running_schedulers, socket_address
from tests.fakes.scheduler import FakeScheduler

_BODY = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{"


async def test_http_of_a_router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEADERS_S", 0.1)
    monkeypatch.setattr(bodies, "BODY_S", 0.1)
    fake = FakeScheduler(socket_address(tmp_path, "one"))
    async with running_schedulers(fake), running_router([fake.address]) as (server, _):
        await server.wait_ready()
        gateway = Gateway(server.intake, server.metrics.registry, server.readiness, max_body_bytes=10_000)
        listening = GatewayServer(gateway, "127.0.0.1", 0)
        listening.start()
        url = f"http://127.0.0.1:{listening.port}/v1/completions"
        try:
            async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(retries=5)) as client:
                # The response takes longer than headers may take, and is still delivered.
                fake.step_seconds = 0.05
                answer = await client.post(url, json={"prompt": "Hi", "max_tokens": 8})
                assert answer.status_code == 200
                for said, answered in ((b"GET / HTT", b""), (b"", b""), (_BODY, b"HTTP/1.1 408")):
                    reader, writer = await asyncio.open_connection("127.0.0.1", listening.port)
                    writer.write(said)
                    async with asyncio.timeout(10):
                        got = await reader.read(12)
                    assert got == answered
                    writer.close()
        finally:
            await listening.stop()


def _stop_this_process(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


async def test_a_body_whose_parser_is_stopped_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next one is parsed."""
    monkeypatch.setattr(bodies.parsing, "is_light", lambda body: False)
    fake = FakeScheduler(socket_address(tmp_path, "one"))
    async with running_schedulers(fake), running_router([fake.address]) as (server, _):
        await server.wait_ready()
        gateway = Gateway(server.intake, server.metrics.registry, server.readiness, max_body_bytes=10_000)
        listening = GatewayServer(gateway, "127.0.0.1", 0)
        listening.start()
        url, asked = f"http://127.0.0.1:{listening.port}/v1/completions", {"prompt": "Hi", "max_tokens": 2}
        try:
            async with httpx.AsyncClient(timeout=30) as client:
                with monkeypatch.context() as patched:
                    patched.setattr(bodies, "PARSE_S", 1.0)
                    patched.setattr(bodies.parsing, "parse_to_bytes", _stop_this_process)
                    answer = await client.post(url, json=asked)
                assert (answer.status_code, "parsed within 1 s" in answer.text) == (503, True)
                assert (await client.post(url, json=asked)).status_code == 200
        finally:
            await listening.stop()
