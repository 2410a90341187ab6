"""Tenants of one router do not starve each other: priorities, streams, tokens and queues; a fake scheduler computes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from benchmarks.router.offered_load import retry_delay_of
from protos import inference_pb2 as pb
from router.api.gateway.app import Gateway
from router.server import RouterServer
from scheduler.core.messages import ANY_PRIORITY
from tests.fakes.routers import receive, running_router, running_schedulers, socket_address
from tests.fakes.scheduler import FakeScheduler

LARGE, SMALL = "large-0123456789abcdef", "small-0123456789abcdef"
FIELDS = {"model": "test-model", "prompt": [5, 6], "max_tokens": 3}


def _as(key: str) -> tuple[tuple[str, str], ...]:
    return (("x-api-key", key),)


def _request(max_tokens: int = 4, priority: int = 0) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6]), sampling=sampling, priority=priority)


@asynccontextmanager
async def _router(
    path: Path, scheduler: FakeScheduler, large: str = "", small: str = "", **options: Any
) -> AsyncIterator[tuple[RouterServer, Any]]:
    """large, small: further fields of the two keys."""
    file = path / "keys.yaml"
    file.write_text(f"keys:\n- {{name: large, key: {LARGE}{large}}}\n- {{name: small, key: {SMALL}{small}}}\n")
    file.chmod(0o600)
    async with (
        running_schedulers(scheduler),
        running_router([scheduler.address], api_keys_file=str(file), **options) as (server, stub),
    ):
        await server.wait_ready()
        yield server, stub


async def _refusal(call: Any) -> tuple[str, float]:
    """The error's details, and the seconds after which to try again."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await receive(call)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    delay = retry_delay_of(caught.value)
    assert delay is not None, "a refusal without RetryInfo"
    return caught.value.details() or "", delay


async def test_a_key_is_not_more_urgent_than_others_unless_its_entry_says_so(tmp_path: Path) -> None:
    scheduler = FakeScheduler(socket_address(tmp_path, "one"))
    async with _router(tmp_path, scheduler, small=", priority: -5") as (_, stub):
        for key in (LARGE, SMALL):
            for priority in (-(2**31), 0, 7):
                await receive(stub.Generate(_request(priority=priority), metadata=_as(key)))
    # Before: -2147483648 for the key whose entry says nothing.
    assert [submit.priority for submit in scheduler.submitted] == [0, 0, 7, -5, 0, 7]


@pytest.mark.parametrize("by_option", [False, True])
async def test_a_key_has_a_bounded_number_of_requests_at_once(tmp_path: Path, by_option: bool) -> None:
    scheduler = FakeScheduler(socket_address(tmp_path, "one"), pause_at=1)
    entry = "" if by_option else ", max_streams: 2"
    options = {"max_streams_per_key": 2} if by_option else {}
    small = ", max_streams: 3" if by_option else ""
    async with _router(tmp_path, scheduler, large=entry, small=small, **options) as (server, stub):
        calls = [stub.Generate(_request(), metadata=_as(LARGE)) for _ in range(2)]
        for call in calls:
            await receive(call, until=lambda received: bool(received.token_ids))
        words, delay = await _refusal(stub.Generate(_request(), metadata=_as(LARGE)))
        assert "max_streams=2" in words
        assert delay > 0
        with pytest.raises(grpc.aio.AioRpcError, match="max_streams=2"):
            await stub.Tokenize(pb.TokenizeRequest(prompt="x"), metadata=_as(LARGE))
        gateway = Gateway(
            server.intake, server.metrics.registry, server.readiness, max_body_bytes=100_000, keys=server.keys
        )
        transport = httpx.ASGITransport(gateway.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            response = await client.post("/v1/completions", json=FIELDS, headers={"x-api-key": LARGE})
        assert response.status_code == httpx.codes.TOO_MANY_REQUESTS
        assert int(response.headers["Retry-After"]) >= 1
        # The other key has its own, and reading the file again forgets nobody's streams.
        others = [stub.Generate(_request(), metadata=_as(SMALL)) for _ in range(3)]
        for call in others:
            await receive(call, until=lambda received: bool(received.token_ids))
        assert server.keys is not None
        server.keys.reread()
        await _refusal(stub.Generate(_request(), metadata=_as(LARGE)))
        calls[0].cancel()
        await scheduler.wait_until(lambda fake: fake.num_live == 4)
        await scheduler.resume_steps()
        assert (await receive(stub.Generate(_request(), metadata=_as(LARGE)))).finished is not None


async def test_tokens_count_while_a_stream_runs_and_do_not_cut_it(tmp_path: Path) -> None:
    scheduler = FakeScheduler(socket_address(tmp_path, "one"), pause_at=100)
    async with _router(tmp_path, scheduler, large=", tokens_per_minute: 60") as (_, stub):
        call = stub.Generate(_request(max_tokens=110), metadata=_as(LARGE))
        received = await receive(call, until=lambda received: len(received.token_ids.get(0, ())) >= 100)
        # Before: the next request began, as the tokens of the first one counted at its end.
        words, delay = await _refusal(stub.Generate(_request(), metadata=_as(LARGE)))
        assert "tokens_per_minute=60" in words
        assert 30 < delay <= 44
        assert (await receive(stub.Generate(_request(), metadata=_as(SMALL)))).finished is not None
        await scheduler.resume_steps()
        async with asyncio.timeout(10):
            assert (await receive(call, into=received)).finished is not None


async def test_a_tenant_whose_share_of_the_queue_is_used_up_is_refused_early_and_others_are_not(tmp_path: Path) -> None:
    scheduler = FakeScheduler(socket_address(tmp_path, "one"), refused_tenants={"large": ANY_PRIORITY})
    async with _router(tmp_path, scheduler, small=", weight: 2.5") as (_, stub):
        words, delay = await _refusal(stub.Generate(_request(), metadata=_as(LARGE)))
        assert "the share of tenant large" in words
        assert delay > 0
        assert (await receive(stub.Generate(_request(), metadata=_as(SMALL)))).finished is not None
    assert [(submit.tenant, submit.weight) for submit in scheduler.submitted] == [("small", 2.5)]


async def test_one_tenant_does_not_fill_a_router(tmp_path: Path) -> None:
    scheduler = FakeScheduler(socket_address(tmp_path, "one"), pause_at=1)
    async with _router(tmp_path, scheduler, max_streams=6) as (_, stub):
        calls = [stub.Generate(_request(), metadata=_as(LARGE)) for _ in range(3)]
        for call in calls:
            await receive(call, until=lambda received: bool(received.token_ids))
        words, _ = await _refusal(stub.Generate(_request(), metadata=_as(LARGE)))
        assert "3 of them from this tenant" in words
        # Before: the fourth to sixth requests of the large one were let in, and this one was refused.
        await receive(stub.Generate(_request(), metadata=_as(SMALL)), until=lambda received: bool(received.token_ids))
