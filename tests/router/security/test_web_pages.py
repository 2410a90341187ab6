"""Requests of web pages to a router without keys: what is let in, as a table, and by a real server."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.api.gateway.app import Gateway
from router.api.gateway.server import GatewayServer
from router.security.web_pages import WebPageRules
from tests.fakes.routers import running_router, running_schedulers, socket_address
from tests.fakes.scheduler import FakeScheduler

JSON, FORM = "application/json", "application/x-www-form-urlencoded"
CHAT = "/v1/chat/completions"
LOOPBACK, WIDE = "127.0.0.1", "0.0.0.0"
LINK = {"sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
# Bound to, method and path, headers, and the code of the refusal; empty: it is let in.
RULES: tuple[tuple[str, str, dict[str, str], str], ...] = (
    # Programs.
    (LOOPBACK, f"POST {CHAT}", {"content-type": JSON}, ""),
    (LOOPBACK, f"POST {CHAT}", {"content-type": "Application/JSON; charset=utf-8"}, ""),
    (LOOPBACK, f"POST {CHAT}", {"content-type": "application/vnd.api+json"}, ""),
    (LOOPBACK, f"POST {CHAT}", {}, ""),
    (LOOPBACK, f"POST {CHAT}", {"content-type": FORM}, "unsupported_media_type"),
    (LOOPBACK, f"POST {CHAT}", {"content-type": "text/plain"}, "unsupported_media_type"),
    (LOOPBACK, f"POST {CHAT}", {"content-type": "text/plain; application/json"}, "unsupported_media_type"),
    (LOOPBACK, f"POST {CHAT}", {"content-type": "multipart/form-data; boundary=a"}, "unsupported_media_type"),
    (LOOPBACK, f"POST {CHAT}", {"content-type": ""}, "unsupported_media_type"),
    (WIDE, f"POST {CHAT}", {"content-type": FORM, "host": "10.0.0.7"}, "unsupported_media_type"),
    (LOOPBACK, "POST /tokenize", {"content-type": FORM}, "unsupported_media_type"),
    # Their bodies are no JSON, are not read, or are not there.
    (LOOPBACK, "POST /v1/files", {"content-type": "multipart/form-data; boundary=a"}, ""),
    (LOOPBACK, "POST /v1/batches/batch_1/cancel", {"content-type": FORM}, ""),
    (LOOPBACK, "POST /ping", {"content-type": FORM}, ""),
    (LOOPBACK, f"POST {CHAT}", {"content-type": FORM, "content-length": "0"}, ""),
    (
        LOOPBACK,
        f"POST {CHAT}",
        {"content-type": FORM, "content-length": "0", "transfer-encoding": "chunked"},
        "unsupported_media_type",
    ),
    # Names.
    (LOOPBACK, "GET /v1/models", {"host": "[::1]:8000"}, ""),
    (LOOPBACK, "GET /v1/models", {"host": "evil.example:8000"}, "host_not_allowed"),
    (LOOPBACK, "GET /metrics", {"host": "evil.example"}, "host_not_allowed"),
    (LOOPBACK, "GET /health", {"host": "evil.example"}, "host_not_allowed"),
    (LOOPBACK, "GET /docs", {"host": "evil.example", **LINK}, "host_not_allowed"),
    (LOOPBACK, "GET /no/such/page", {"host": "evil.example"}, "host_not_allowed"),
    (LOOPBACK, "GET /v1/models", {"host": "router:8000"}, "host_not_allowed"),
    (LOOPBACK, "GET /v1/models", {"host": "octavo.example"}, ""),
    (WIDE, "GET /v1/models", {"host": "router:8000"}, ""),
    (WIDE, "GET /health", {"host": "10.244.0.7:8000"}, ""),
    (WIDE, "GET /v1/models", {"host": "octavo.example"}, ""),
    (WIDE, "GET /v1/models", {"host": "evil.example:8000"}, "host_not_allowed"),
    # HTTP/1.0.
    (LOOPBACK, "GET /health", {"host": ""}, ""),
    (LOOPBACK, "GET /health", {"host": "", "origin": "http://evil.example"}, "host_not_allowed"),
    (LOOPBACK, "GET /health", {"host": "", "sec-fetch-mode": "no-cors"}, "host_not_allowed"),
    # Its own pages.
    (
        LOOPBACK,
        f"POST {CHAT}",
        {"content-type": JSON, "origin": "http://localhost:8000", "sec-fetch-site": "same-origin"},
        "",
    ),
    (LOOPBACK, f"POST {CHAT}", {"content-type": JSON, "origin": "https://LOCALHOST:8000"}, ""),
    (LOOPBACK, "GET /v1/models", {"sec-fetch-site": "same-origin"}, ""),
    (LOOPBACK, "GET /v1/models", {"sec-fetch-site": "none"}, ""),
    (WIDE, f"POST {CHAT}", {"content-type": JSON, "origin": "http://10.0.0.7:8000", "host": "10.0.0.7:8000"}, ""),
    # Others.
    (LOOPBACK, f"POST {CHAT}", {"content-type": JSON, "origin": "http://evil.example"}, "foreign_page"),
    (LOOPBACK, f"POST {CHAT}", {"content-type": JSON, "origin": "null"}, "foreign_page"),
    (LOOPBACK, f"POST {CHAT}", {"content-type": JSON, "origin": ""}, "foreign_page"),
    (
        LOOPBACK,
        f"POST {CHAT}",
        {"content-type": JSON, "origin": "http://localhost:3000", "sec-fetch-site": "same-site"},
        "foreign_page",
    ),
    (LOOPBACK, f"POST {CHAT}", {"content-type": JSON, "sec-fetch-site": "cross-site"}, "foreign_page"),
    (
        LOOPBACK,
        "POST /v1/files",
        {"content-type": "multipart/form-data; boundary=a", "origin": "http://evil.example"},
        "foreign_page",
    ),
    (LOOPBACK, "DELETE /v1/files/a", {"origin": "http://evil.example"}, "foreign_page"),
    (LOOPBACK, "OPTIONS /v1/models", {"origin": "http://evil.example"}, "foreign_page"),
    (LOOPBACK, "GET /v1/models", {"sec-fetch-site": "same-site"}, "foreign_page"),
    (LOOPBACK, "GET /metrics", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, "foreign_page"),
    (WIDE, "GET /v1/models", {"host": "10.0.0.7", "sec-fetch-site": "cross-site"}, "foreign_page"),
    (LOOPBACK, f"POST {CHAT}", {"content-type": "text/plain", "sec-fetch-site": "none"}, "unsupported_media_type"),
    (LOOPBACK, f"POST {CHAT}", {"sec-fetch-site": "same-origin"}, "unsupported_media_type"),
    # A page that may.
    (
        LOOPBACK,
        f"POST {CHAT}",
        {"content-type": JSON, "origin": "https://chat.example", "sec-fetch-site": "cross-site"},
        "",
    ),
    (LOOPBACK, "OPTIONS /v1/models", {"origin": "https://chat.example", "sec-fetch-site": "cross-site"}, ""),
    (LOOPBACK, "GET /v1/models", {"origin": "https://chat.example", "host": "evil.example"}, "host_not_allowed"),
    # Links from other pages.
    (LOOPBACK, "GET /docs", {"sec-fetch-site": "cross-site", **LINK}, ""),
    (LOOPBACK, "GET /console", {"sec-fetch-site": "cross-site", **LINK}, ""),
    (LOOPBACK, "POST /console", {"sec-fetch-site": "cross-site", **LINK}, "foreign_page"),
    (LOOPBACK, "GET /console", {"sec-fetch-site": "cross-site", **LINK, "sec-fetch-dest": "iframe"}, "foreign_page"),
    (LOOPBACK, "GET /v1/streams/a", {"sec-fetch-site": "cross-site", **LINK}, "foreign_page"),
    (LOOPBACK, "GET /console/data/feed", {"sec-fetch-site": "cross-site", **LINK}, "foreign_page"),
)


def raw(method: str, headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    told = {"host": "localhost:8000", **({"content-length": "2"} if method == "POST" else {}), **headers}
    return [(name.encode(), value.encode()) for name, value in told.items()]


@pytest.mark.parametrize(("bound", "request_line", "headers", "code"), RULES)
def test_rules(bound: str, request_line: str, headers: dict[str, str], code: str) -> None:
    method, path = request_line.split()
    rules = WebPageRules(["octavo.example"], ["https://chat.example"])
    rules.bind(bound)
    refusal = rules.why_refused(method, path, raw(method, headers))
    assert (refusal.code if refusal else "") == code


def test_two_hosts_must_both_be_allowed_and_any_origin_may_be() -> None:
    rules = WebPageRules((), ["*"])
    assert rules.why_refused("GET", "/", [(b"host", b"evil.example")]) is None, "nothing is known before it is bound"
    rules.bind(LOOPBACK)
    assert rules.why_refused("GET", "/", [(b"host", b"localhost"), (b"host", b"evil.example")]) is not None
    assert rules.why_refused("GET", "/", [(b"host", b"localhost"), (b"origin", b"http://evil.example")]) is None


@asynccontextmanager
async def serving(folder: Path, host: str = LOOPBACK, **options: Any) -> AsyncIterator[int]:
    fake = FakeScheduler(socket_address(folder, "one"))
    async with running_schedulers(fake), running_router([fake.address], **options) as (server, _):
        await server.wait_ready()
        gateway = Gateway(
            server.intake,
            server.registry,
            server.readiness,
            max_body_bytes=10_000,
            keys=server.keys,
            allowed_hosts=["octavo.example"],
        )
        http = GatewayServer(gateway, host, 0)
        http.start()
        try:
            yield http.port
        finally:
            await http.stop()


ASKED = {"prompt": "Hi", "max_tokens": 1}


async def test_a_real_server_refuses_pages_and_answers_programs(tmp_path: Path) -> None:
    async with serving(tmp_path) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        for headers in ({}, {"host": "localhost:80"}, {"host": "octavo.example"}):
            assert (await client.post("/v1/completions", json=ASKED, headers=headers)).status_code == 200
        for path in ("/metrics", "/health", "/docs", "/v1/models", "/nothing"):
            answer = await client.get(path, headers={"host": "evil.example"})
            assert answer.status_code == 403
            error = answer.json()["error"]
            assert error["code"] == "host_not_allowed"
            for told in ("Host='evil.example'", "localhost", "octavo.example", "allowed_hosts", "api_keys_file"):
                assert told in error["message"]
        answer = await client.post("/v1/completions", json=ASKED, headers={"origin": "http://evil.example"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "foreign_page")
        answer = await client.post("/v1/completions", content=json.dumps(ASKED), headers={"content-type": FORM})
        assert answer.status_code == 415
        assert f"Content-Type='{FORM}': send application/json" in answer.json()["error"]["message"]
        # A program of another day.
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.0\r\n\r\n")
        assert (await reader.read(12)) == b"HTTP/1.1 200"
        writer.close()


async def test_with_keys_nothing_is_asked(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("keys: [{name: a, key: a-0123456789abcdef}]")
    path.chmod(0o600)
    headers = {"authorization": "Bearer a-0123456789abcdef", "origin": "http://a.example", "content-type": FORM}
    async with (
        serving(tmp_path, api_keys_file=str(path)) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers={"host": "any.example"}) as client,
    ):
        assert (await client.post("/v1/completions", content=json.dumps(ASKED), headers=headers)).status_code == 200
        assert (await client.get("/health")).status_code == 200
