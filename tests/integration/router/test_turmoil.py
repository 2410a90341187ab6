"""Replicas die, drain, give up requests and come back at random moments: every stream is the same as alone."""

import asyncio
import random
from pathlib import Path

import pytest

from protos import inference_pb2 as pb
from router.streams import migrations, placement
from tests.fakes.routers import Received, receive, running_router, running_schedulers, socket_address
from tests.fakes.scheduler import FakeScheduler

NUM_STREAMS, NUM_TOKENS, NUM_ACCIDENTS = 16, 60, 10


def _request(number: int) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(max_tokens=NUM_TOKENS - number, seed=number, n=1 + number % 3)
    return pb.GenerateRequest(prompt=f"Once upon a time {number}", request_id=f"r{number}", sampling=sampling)


async def _one(stub, number: int, begun: asyncio.Barrier) -> Received:
    call = stub.Generate(_request(number))
    received = await receive(call, until=lambda r: r.started is not None)
    await begun.wait()
    return await receive(call, into=received)


async def _all(stub, begun: asyncio.Barrier) -> list[Received]:
    return await asyncio.gather(*(_one(stub, number, begun) for number in range(NUM_STREAMS)))


async def _have_accident(accident: str, victims: list[FakeScheduler], seconds: float) -> None:
    """Causes an accident that lasts `seconds`, then restores the replicas."""
    for fake in victims:
        if accident == "kill":
            await fake.kill()
        elif accident == "give up":
            fake.give_up_all()
        else:
            fake.draining, fake.capacity = accident == "drain", 2 if accident == "full" else None
            fake.send_load()
    await asyncio.sleep(seconds)
    for fake in victims:
        fake.draining, fake.capacity = False, None
        if accident == "kill":
            await fake.start()
        else:
            fake.send_load()


async def test_every_stream_says_what_it_says_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrations, "_SETTLE_S", 0.01)
    monkeypatch.setattr(placement, "_TRY_AGAIN_S", 0.02)
    choose = random.Random(1)
    fakes = [FakeScheduler(socket_address(tmp_path, name)) for name in ("a", "b")]
    async with (
        asyncio.timeout(60),
        running_schedulers(*fakes),
        running_router([fake.address for fake in fakes]) as (server, stub),
    ):
        await server.wait_ready()
        want = await _all(stub, asyncio.Barrier(NUM_STREAMS))
        for fake in fakes:
            fake.pause_at = 0
        begun = asyncio.Barrier(NUM_STREAMS + 1)
        disturbed = asyncio.create_task(_all(stub, begun))
        await begun.wait()
        for number in range(NUM_ACCIDENTS):
            for fake in fakes:
                # So that each accident meets all streams in the middle.
                fake.pause_at = 4 * (number + 1)
            victims = choose.sample(fakes, choose.choice([1, 1, 2]))
            accident = choose.choice(["kill", "kill", "give up", "drain", "full"])
            await _have_accident(accident, victims, choose.uniform(0.0, 0.05))
            # The next accident waits until the router serves again.
            await server.wait_ready()
            await asyncio.sleep(choose.uniform(0.0, 0.05))
        await asyncio.gather(*(fake.resume_steps() for fake in fakes))
        got = await disturbed
    for one, other in zip(want, got, strict=True):
        assert (one.token_ids, one.text, one.finish) == (other.token_ids, other.text, other.finish)
        assert other.exact
    num_moves = server.metrics.registry.get_sample_value("octavo_resubmissions_total")
    assert num_moves is not None
    assert num_moves >= NUM_STREAMS
