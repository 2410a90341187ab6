"""A router's connection to a scheduler is half-open: the scheduler's side is gone without a word. It connects anew."""

import asyncio
from pathlib import Path

from benchmarks.faults.means.relay import Relays
from protos import inference_pb2 as pb
from tests.fakes.routers import receive, running_router, running_schedulers
from tests.fakes.scheduler import FakeScheduler
from tests.support.ports import free_ports

# Two times heartbeat_timeout below, and much room. Before, the next Session used the same connection, until gRPC's
# keepalive closed that: 30 to 80 s.
PATIENCE_S = 15.0


async def test_a_silent_scheduler_is_called_over_a_new_connection(tmp_path: Path) -> None:
    own, relayed = free_ports(1), free_ports(1)
    with Relays([(relayed, own)]) as relays:
        fake = FakeScheduler(f"127.0.0.1:{own}", pause_at=3)
        async with (
            running_schedulers(fake),
            running_router([f"127.0.0.1:{relayed}"], heartbeat_timeout=1.5) as (server, stub),
        ):
            await server.wait_ready()
            sampling = pb.SamplingParams(max_tokens=8, seed=1)
            call = stub.Generate(pb.GenerateRequest(prompt="Once upon a time", sampling=sampling))
            received = await receive(call, until=lambda r: sum(map(len, r.token_ids.values())) >= 3)
            relays.call(lambda: relays.all[0].forget_one_side(keep_dialer=True))
            await fake.resume_steps()
            async with asyncio.timeout(PATIENCE_S):
                received = await receive(call, into=received)
            assert received.finished is not None
            assert len(fake.submitted) == 2
