"""The console over HTTP: what its page may load, what its events tell, and who is told what."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from protos import admin_pb2 as pb
from protos import inference_pb2
from router.api.console.feed import Feed, _Reader
from router.api.console.images import chat_images
from router.api.console.pages import Console
from router.api.gateway.app import Gateway
from router.api.gateway.server import GatewayServer
from router.api.observer import Observer
from router.security.identity import ANYONE
from router.server import RouterServer
from tests.fakes.media import media_scheduler
from tests.fakes.routers import receive, running_router, running_schedulers, socket_address
from tests.fakes.scheduler import FakeScheduler

HOST = "127.0.0.1"
ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"


@pytest.fixture
async def scheduler(tmp_path: Path) -> AsyncIterator[FakeScheduler]:
    fake = FakeScheduler(socket_address(tmp_path, "one"), pause_at=3)
    async with running_schedulers(fake):
        yield fake


@contextlib.asynccontextmanager
async def served(server: RouterServer) -> AsyncIterator[tuple[httpx.AsyncClient, Console]]:
    console = Console(server.observer, server.operator, partial(chat_images, server.intake, 100_000))
    gateway = Gateway(
        server.intake, server.registry, server.readiness, max_body_bytes=100_000, keys=server.keys, console=console
    )
    http = GatewayServer(gateway, HOST, 0)
    http.start()
    try:
        async with httpx.AsyncClient(base_url=f"http://{HOST}:{http.port}", timeout=20) as client:
            yield client, console
    finally:
        await http.stop()


@pytest.fixture
async def open_router(scheduler: FakeScheduler) -> AsyncIterator[tuple[RouterServer, Any]]:
    async with running_router([scheduler.address]) as (server, stub):
        await server.wait_ready()
        yield server, stub


async def events(client: httpx.AsyncClient, count: int, **headers: str) -> list[tuple[str, Any]]:
    """The first events of the feed: name and content."""
    found: list[tuple[str, Any]] = []
    async with client.stream("GET", "/console/data/feed", headers=headers) as answer:
        assert answer.status_code == 200
        name = ""
        async for line in answer.aiter_lines():
            field, _, value = line.partition(": ")
            if field == "event":
                name = value
            elif field == "data":
                found.append((name, json.loads(value)))
                if len(found) == count:
                    break
    return found


def states(found: list[tuple[str, Any]]) -> list[dict[str, Any]]:
    return [content for name, content in found if name == "state"]


async def test_the_page_may_load_nothing_but_its_own_files(open_router: tuple[RouterServer, Any]) -> None:
    async with served(open_router[0]) as (client, _):
        page = await client.get("/console")
        assert page.status_code == 200
        assert page.headers["content-type"].startswith("text/html")
        for path in ("/console", "/console/static/main.js", "/console/static/console.css", "/console/static/icon.svg"):
            answer = await client.get(path)
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
        for path in ("static/pages.py", "static/..%2Fpages.py", "static/", "nothing"):
            assert (await client.get(f"/console/{path}")).status_code == 404, path
        document = (await client.get("/openapi.json")).json()
        assert not [path for path in document["paths"] if path.startswith("/console/data")]


async def test_without_the_option_there_is_no_console(open_router: tuple[RouterServer, Any]) -> None:
    server, _ = open_router
    http = GatewayServer(Gateway(server.intake, server.registry, server.readiness, max_body_bytes=1000), HOST, 0)
    http.start()
    async with httpx.AsyncClient(base_url=f"http://{HOST}:{http.port}") as client:
        for path in ("/console", "/console/static/main.js", "/console/data/feed"):
            assert (await client.get(path)).status_code == 404
    await http.stop()


async def test_the_feed_tells_state_and_events(open_router: tuple[RouterServer, Any], scheduler: FakeScheduler) -> None:
    server, stub = open_router
    stream = stub.Generate(asked("mine"))
    await receive(stream, until=lambda received: len(received.token_ids.get(0, ())) == 3)
    async with served(server) as (client, _):
        found = await events(client, 2)
        assert [name for name, _ in found] == ["events", "state"]
        assert [each["kind"] for each in found[0][1]] == ["replica"]
        (state,) = states(found)
        assert state["is_admin"] is True
        assert state["router"]["num_streams"] == 1
        assert [each["request_id"] for each in state["requests"]] == ["mine"]
        assert [(each["state"], each["num_running"]) for each in state["replicas"]] == [("ready", 1)]
        await scheduler.resume_steps()
        async for _ in stream:
            pass
        told = [each for name, content in await events(client, 2) if name == "events" for each in content]
        assert [(each["kind"], each["request_id"]) for each in told][-1] == ("ended", "mine")


async def told_of_images(scheduler: FakeScheduler, **options: Any) -> dict[str, Any]:
    async with (
        running_schedulers(scheduler),
        running_router([scheduler.address], **options) as (server, _),
        served(server) as (client, _),
    ):
        await server.wait_ready()
        (state,) = states(await events(client, 2))
        return state["router"]["images"]


async def test_the_page_is_told_what_images_a_chat_may_have(tmp_path: Path) -> None:
    limits = {"limit_mm_per_prompt": {"image": {"count": 3, "width": 640}}, "max_item_mib": 0.5, "max_items_mib": 0.06}
    told = await told_of_images(media_scheduler(socket_address(tmp_path, "one")), **limits)
    own = {"count": 3, "width": 640, "height": 0, "item_bytes": 2**19, "request_bytes": 25_848, "pixels": 40_000_000}
    # A body of 100,000 bytes keeps 65,536 for texts; the rest are three bytes of a file for four.
    assert told == {"why_not": "", **own}
    limits["max_items_mib"] = 0.01
    assert (await told_of_images(media_scheduler(socket_address(tmp_path, "two")), **limits))["request_bytes"] == 10_485


async def test_the_page_is_told_why_there_can_be_no_images(tmp_path: Path) -> None:
    told = await told_of_images(FakeScheduler(socket_address(tmp_path, "text")))
    assert told["why_not"] == "test-model takes text only: no image can be attached"
    none = {"limit_mm_per_prompt": {"image": 0}}
    told = await told_of_images(media_scheduler(socket_address(tmp_path, "none")), **none)
    assert told["why_not"].startswith("limit_mm_per_prompt allows no images")
    async with running_router([socket_address(tmp_path, "away")]) as (server, _):
        assert "no replica is ready" in chat_images(server.intake, 100_000)["why_not"]


async def test_requests_are_explained_or_not_known(open_router: tuple[RouterServer, Any]) -> None:
    async with served(open_router[0]) as (client, _):
        # The fake replica has no Admin service: nobody answers.
        answer = await client.get("/console/data/requests/nobody's")
        assert answer.status_code == 503
        assert "no replica answers" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "localhost:8000"}, 200),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        # A foreign page whose name leads to this machine.
        ({"host": "evil.example:8000"}, 403),
    ],
)
async def test_without_keys_only_this_machine_and_its_own_pages_are_told(
    open_router: tuple[RouterServer, Any], headers: dict[str, str], status: int
) -> None:
    async with (
        served(open_router[0]) as (client, _),
        client.stream("GET", "/console/data/feed", headers=headers) as answer,
    ):
        assert answer.status_code == status


async def test_with_keys_a_tenant_is_told_of_its_own_requests(scheduler: FakeScheduler, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(f"keys:\n- {{name: alice, key: {ALICE}, admin: true}}\n- {{name: bob, key: {BOB}}}\n")
    path.chmod(0o600)
    async with (
        running_router([scheduler.address], api_keys_file=str(path)) as (server, stub),
        served(server) as (client, _),
    ):
        await server.wait_ready()
        for name, key in (("a", ALICE), ("b", BOB)):
            call = stub.Generate(asked(f"of-{name}", max_tokens=2), metadata=(("authorization", f"Bearer {key}"),))
            assert (await receive(call)).finished is not None
        live = stub.Generate(asked("live-b"), metadata=(("authorization", f"Bearer {BOB}"),))
        await receive(live, until=lambda received: len(received.token_ids.get(0, ())) == 3)
        # The page is the same for all; what it shows is not.
        assert (await client.get("/console")).status_code == 200
        assert (await client.get("/console/static/main.js")).status_code == 200
        for wrong in ({}, {"authorization": "Bearer wrong"}):
            assert (await client.get("/console/data/feed", headers=wrong)).status_code == 401
            assert (await client.get("/console/data/requests/of-a", headers=wrong)).status_code == 401
        (told, state) = (content for _, content in await events(client, 2, authorization=f"Bearer {BOB}"))
        assert [each["request_id"] for each in told] == ["of-b"]
        assert [each["request_id"] for each in state["requests"]] == ["live-b"]
        assert (state["is_admin"], state["replicas"], state["router"]["num_streams"]) == (False, [], 0)
        (told, state) = (content for _, content in await events(client, 2, authorization=f"Bearer {ALICE}"))
        assert [each["request_id"] for each in told if each["kind"] == "ended"] == ["of-a", "bob/of-b"]
        assert [each["request_id"] for each in state["requests"]] == ["bob/live-b"]
        assert len(state["replicas"]) == 1
        live.cancel()


# --- What it costs


class CountingObserver(Observer):
    num_looks = 0

    async def observe_as(self, identity: Any) -> pb.ObserveResponse:
        self.num_looks += 1
        return await super().observe_as(identity)


async def test_ten_consoles_cost_one_look_and_none_costs_nothing(open_router: tuple[RouterServer, Any]) -> None:
    server, _ = open_router
    observer = CountingObserver("test-model", server._replicas, server.streams, server.metrics)
    feed = Feed(observer, dict)
    readers = [feed.events(ANYONE) for _ in range(10)]
    first = await asyncio.gather(*(anext(reader) for reader in readers))
    # Not only alike: made once.
    assert len(set(map(id, first))) == 1
    await asyncio.gather(*(anext(reader) for reader in readers))
    assert observer.num_looks == 1
    for reader in readers:
        await reader.aclose()
    assert feed.num_readers == 0
    async with asyncio.timeout(10):
        # The task looks for readers once a second.
        while feed._task is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    looks = observer.num_looks
    await asyncio.sleep(0)
    assert observer.num_looks == looks


def test_a_console_that_reads_slowly_loses_the_oldest_and_keeps_no_memory() -> None:
    reader = _Reader(ANYONE, 0)
    for number in range(20):
        reader.put(b"%d" % number)
    assert [int(reader.waiting.get_nowait()) for _ in range(reader.waiting.qsize())] == list(range(12, 20))


def asked(request_id: str, max_tokens: int = 40) -> inference_pb2.GenerateRequest:
    sampling = inference_pb2.SamplingParams(max_tokens=max_tokens, seed=1)
    return inference_pb2.GenerateRequest(prompt="Once upon a time", request_id=request_id, sampling=sampling)
