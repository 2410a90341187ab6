"""Rate limits of API keys hold over all processes of all routers: a scheduler counts."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from protos import inference_pb2 as pb
from protos.scheduler_pb2 import CountRequest, KeyUse
from router.errors import RateLimited
from router.security import shared_limits
from router.security.identity import Identity, RateLimits
from router.security.keys import Keys
from scheduler.sessions import rate_counts
from scheduler.sessions.rate_counts import RateCounts
from tests.fakes.routers import receive, running_router, running_schedulers, socket_address
from tests.fakes.scheduler import FakeScheduler

KEY = "a-key-of-a-tenant"


class Clock:
    """Time that tests set, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Process:
    """The limits of one key at one router process; `sync` has the counts count."""

    def __init__(self, clock: Clock, requests: int | None = 6, tokens: int | None = None) -> None:
        self.limits = RateLimits(requests, tokens, clock)

    def sync(self, counts: RateCounts) -> None:
        keys = [self.limits.take_use("k")] if self.limits.are_used else []
        for left in counts.count(CountRequest(keys=keys)).keys:
            self.limits.set_left(left)

    def num_accepted(self, tries: int) -> int:
        accepted = 0
        for _ in range(tries):
            with contextlib.suppress(RateLimited):
                self.limits.begin_request()
                accepted += 1
        return accepted


def test_what_one_process_uses_another_does_not_have() -> None:
    clock = Clock()
    counts, one, other = RateCounts(clock), Process(clock), Process(clock)
    assert one.num_accepted(4) == 4
    one.sync(counts)
    other.sync(counts)
    assert other.num_accepted(9) == 2
    other.sync(counts)
    one.sync(counts)
    assert one.num_accepted(9) == 0
    clock.now = 20
    # Two come back in 20 s: for both together, if they tell each other.
    assert one.num_accepted(1) == 1
    one.sync(counts)
    other.sync(counts)
    assert other.num_accepted(9) == 1
    clock.now = 100
    one.sync(counts)
    assert len(counts) == 0


def test_tokens_count_too_and_may_be_overdrawn() -> None:
    clock = Clock()
    counts, one, other = RateCounts(clock), Process(clock, None, 100), Process(clock, None, 100)
    one.limits.spend_tokens(90)
    other.limits.spend_tokens(70)
    one.sync(counts)
    other.sync(counts)
    assert other.num_accepted(1) == 0
    with pytest.raises(RateLimited, match="tokens_per_minute=100 are used up: try again in 37 s"):
        other.limits.begin_request()


def test_a_scheduler_that_takes_over_goes_by_what_routers_know() -> None:
    clock = Clock()
    counts, one, other = RateCounts(clock), Process(clock), Process(clock)
    assert one.num_accepted(5) == 5
    one.sync(counts)
    other.sync(counts)
    later = RateCounts(clock)
    other.sync(later)
    one.sync(later)
    assert one.num_accepted(9) == 1


def test_what_could_not_be_counted_is_counted_later() -> None:
    clock = Clock()
    counts, one = RateCounts(clock), Process(clock)
    counts.count(CountRequest(keys=[KeyUse(key="k", requests_per_minute=6, num_requests=1, requests_left=5)]))
    assert one.num_accepted(2) == 2
    use = one.limits.take_use("k")
    assert one.num_accepted(1) == 1
    one.limits.give_back(use)
    one.sync(counts)
    assert one.num_accepted(9) == 2


def test_the_number_of_keys_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_counts, "MAX_KEYS", 3)
    counts = RateCounts(Clock())
    for key in range(5):
        counts.count(CountRequest(keys=[KeyUse(key=str(key), requests_per_minute=6, num_requests=1, requests_left=5)]))
    assert [each.key for each in counts.count(CountRequest()).keys] == ["2", "3", "4"]


@contextlib.asynccontextmanager
async def _routers(tmp_path: Path, *addresses: str) -> AsyncIterator[list[Any]]:
    """Two routers over the same schedulers, with one key of 3 requests a minute."""
    path = tmp_path / "keys.yaml"
    path.write_text(f"keys:\n- {{name: alice, key: {KEY}, requests_per_minute: 3}}\n")
    path.chmod(0o600)
    async with contextlib.AsyncExitStack() as stack:
        stubs = []
        for _ in range(2):
            server, stub = await stack.enter_async_context(running_router(addresses, api_keys_file=str(path)))
            await server.wait_ready()
            stubs.append((server, stub))
        yield stubs


async def _ask(stub: Any) -> bool:
    """Returns True if the request was not refused for its rate."""
    request = pb.GenerateRequest(prompt="hi", sampling=pb.SamplingParams(max_tokens=1))
    call = stub.Generate(request, metadata=[("authorization", f"Bearer {KEY}")])
    with contextlib.suppress(grpc.aio.AioRpcError):
        await receive(call)
    code = await call.code()
    assert code in (grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED)
    return code is grpc.StatusCode.OK


def _left(server: Any) -> float:
    (identity,) = server.keys.limited()
    assert identity.limits._requests is not None
    return identity.limits._requests.left


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - routers count by themselves
            await asyncio.sleep(shared_limits.INTERVAL_S / 4)


async def test_routers_that_share_schedulers_share_limits_and_survive_the_one_that_counts(tmp_path: Path) -> None:
    first, second = (FakeScheduler(socket_address(tmp_path, name)) for name in ("one", "two"))
    async with (
        running_schedulers(first, second),
        _routers(tmp_path, first.address, second.address) as ((one, stub), (other, other_stub)),
    ):
        assert [await _ask(stub), await _ask(stub)] == [True, True]
        await _until(lambda: _left(other) < 2)
        assert [await _ask(other_stub), await _ask(other_stub)] == [True, False]
        await _until(lambda: _left(one) < 1)
        assert not await _ask(stub)
        assert len(first.rate_counts) == 1
        await first.kill()
        await _until(lambda: len(second.rate_counts) == 1)
        assert not await _ask(stub)
        assert not await _ask(other_stub)


async def test_without_a_scheduler_that_counts_each_router_goes_by_its_own(tmp_path: Path) -> None:
    class OneKey(Keys):
        def __init__(self) -> None:
            """Reads no file."""

        def limited(self) -> list[Identity]:
            return [Identity(tenant="a", key_digest="k", limits=limits)]

    limits = RateLimits(6)
    limits.begin_request()
    await shared_limits.SharedLimits(OneKey(), []).count()
    assert limits.take_use("k").num_requests == 1
