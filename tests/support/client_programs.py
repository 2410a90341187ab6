"""Runs a program of docs/clients while its router stops."""

import asyncio
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from protos import inference_pb2 as pb
from tests.fakes.routers import receive, running_router, running_schedulers, socket_address
from tests.fakes.scheduler import FakeScheduler
from tests.support.repository import ROOT

CLIENTS = ROOT / "docs" / "clients"
_PAUSE_AT = 6


async def check_resumes(directory: Path, command: Sequence[object], environment: Mapping[str, str]) -> None:
    """Runs a program against two routers, of which the first stops in the middle of its stream. Raises AssertionError
    unless it prints what a stream gives that nothing disturbs.

    directory: an empty one. command: arguments are added to it. environment: in addition to this process's.
    """
    scheduler = FakeScheduler(socket_address(directory, "one"))
    sampling = pb.SamplingParams(max_tokens=12, seed=5)
    async with (
        running_schedulers(scheduler),
        running_router([scheduler.address]) as (first, stub),
        running_router([scheduler.address]) as (second, _),
    ):
        await first.wait_ready()
        await second.wait_ready()
        expected = (await receive(stub.Generate(pb.GenerateRequest(prompt="Once upon", sampling=sampling)))).text[0]
        scheduler.pause_at = _PAUSE_AT
        addresses = f"127.0.0.1:{first.port},127.0.0.1:{second.port}"
        process = await asyncio.create_subprocess_exec(
            *map(str, command), addresses, "Once upon", "12", "5", stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, **environment},
        )  # fmt: skip
        try:
            async with asyncio.timeout(30):
                assert process.stdout is not None
                begun = await process.stdout.read(1)
                await first.stop()
                await scheduler.resume_steps()
                rest, errors = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert process.returncode == 0, errors.decode()
    assert (begun + rest).decode() == expected
    *_, resumed = scheduler.submitted
    assert resumed.choices[0].output_token_ids, "the second router continues, it does not begin again"
