"""A router that stood still itself does not blame its replicas: their Sessions and streams go on."""

import asyncio
import time
from pathlib import Path

from protos import inference_pb2 as pb
from tests.fakes.routers import receive, running_router, running_schedulers, socket_address
from tests.fakes.scheduler import FakeScheduler

# Longer than heartbeat_timeout and replica_stall_timeout below.
STALL_S = 2.5


async def test_a_stall_of_the_router_costs_no_session_and_opens_no_breaker(tmp_path: Path) -> None:
    fake = FakeScheduler(socket_address(tmp_path, "a"), pause_at=3)
    async with (
        running_schedulers(fake),
        running_router([fake.address], heartbeat_timeout=1.5, replica_stall_timeout=2.0) as (server, stub),
    ):
        await server.wait_ready()
        sampling = pb.SamplingParams(max_tokens=8, seed=1)
        call = stub.Generate(pb.GenerateRequest(prompt="Once upon a time", sampling=sampling))
        received = await receive(call, until=lambda r: sum(map(len, r.token_ids.values())) >= 3)
        # Twice: three broken Sessions within a minute would open the breaker.
        for _ in range(2):
            time.sleep(STALL_S)  # noqa: ASYNC251 - this is the stall
            # The next Loads come; they say that no step has completed since.
            await asyncio.sleep(0.5)
            assert server.readiness() == (True, f"{fake.address} is ready")
        await fake.resume_steps()
        received = await receive(call, into=received)
        assert received.finished is not None
        assert len(fake.submitted) == 1
