"""A worker is stopped in mid-stream, as by a debugger or a frozen container: SmolLM2 gives the same tokens.

Steps are planned ahead, so that two of them, with one sequence each, are in flight when it stops.
"""

import asyncio
import signal
from pathlib import Path

from octavo import AsyncClient, SamplingParams
from octavo.client.results import Delta, Generation
from tests.support.ports import free_ports
from tests.support.up import Up

SAMPLING = [SamplingParams(temperature=0.8, seed=seed, max_tokens=32, ignore_eos=True) for seed in range(3)]


async def generate(up: Up, *, stop_worker: bool) -> list[Generation]:
    begun = asyncio.Barrier(len(SAMPLING) + 1)

    async def one(client: AsyncClient, sampling: SamplingParams) -> Generation:
        async with client.stream([{"role": "user", "content": "Say something."}], sampling) as stream:
            has_begun = False
            async for event in stream:
                if isinstance(event, Delta) and not has_begun:
                    has_begun = True
                    await begun.wait()
            return stream.generation

    async with AsyncClient(f"localhost:{up.port}", timeout=120) as client, asyncio.TaskGroup() as tasks:
        streams = [tasks.create_task(one(client, sampling)) for sampling in SAMPLING]
        await begun.wait()
        if stop_worker:
            up.child("worker").send_signal(signal.SIGSTOP)
    return [stream.result() for stream in streams]


async def test_a_stopped_worker_is_replaced_and_streams_go_on_exactly(tmp_path: Path) -> None:
    with Up(
        tmp_path, "--dtype=float32", "--kv-cache-memory=0.1", "--max-num-seqs=8", "--worker-threads=1",
        "--max-steps-in-flight=2", "--heartbeat-timeout=4", real=True, metrics_port=free_ports(3),
    ) as up:  # fmt: skip
        up.wait_for("serving; Ctrl-C to stop")
        expected = await generate(up, stop_worker=False)
        stopped = up.child("worker")
        results = await generate(up, stop_worker=True)
        assert [each.choices[0].token_ids for each in results] == [each.choices[0].token_ids for each in expected]
        assert all(each.choices[0].exact for each in results)
        up.wait_for("it hangs and is killed")
        assert not stopped.is_running()
