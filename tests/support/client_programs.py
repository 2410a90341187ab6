"""Runs a program of docs/clients while its router stops or is full."""

import asyncio
import contextlib
import os
import subprocess
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from protos import inference_pb2 as pb
from scheduler.core.messages import ANY_PRIORITY
from tests.fakes.routers import receive, running_router, running_schedulers, socket_address
from tests.fakes.scheduler import FakeScheduler
from tests.support.repository import ROOT

CLIENTS = ROOT / "docs" / "clients"
_PAUSE_AT = 6
_REQUEST = pb.GenerateRequest(prompt="Once upon", sampling=pb.SamplingParams(max_tokens=12, seed=5))
_REFUSALS = "octavo_requests_total", {"outcome": "resource_exhausted"}


async def check_resumes(directory: Path, command: Sequence[object], environment: Mapping[str, str]) -> None:
    """Runs a program against two routers, the first of which stops in mid-stream. Raises AssertionError unless the
    program prints the same text as an undisturbed stream.

    directory: must be empty. command: gets arguments appended. environment: is added to this process's.
    """
    scheduler = FakeScheduler(socket_address(directory, "one"))
    async with (
        running_schedulers(scheduler),
        running_router([scheduler.address]) as (first, stub),
        running_router([scheduler.address]) as (second, _),
    ):
        await first.wait_ready()
        await second.wait_ready()
        expected = (await receive(stub.Generate(_REQUEST))).text[0]
        scheduler.pause_at = _PAUSE_AT
        async with _running(command, f"127.0.0.1:{first.port},127.0.0.1:{second.port}", environment) as process:
            assert process.stdout is not None
            begun = await process.stdout.read(1)
            await first.stop()
            await scheduler.resume_steps()
            assert begun.decode() + await _output(process) == expected
    *_, resumed = scheduler.submitted
    assert resumed.choices[0].output_token_ids, "the second router did not continue the stream, it began again"


async def check_waits(directory: Path, command: Sequence[object], environment: Mapping[str, str]) -> None:
    """Runs a program against a router that refuses it and has room soon afterwards. Raises AssertionError unless the
    program tries again by itself. Arguments as above."""
    scheduler = FakeScheduler(socket_address(directory, "full"))
    async with running_schedulers(scheduler), running_router([scheduler.address]) as (router, stub):
        await router.wait_ready()
        expected = (await receive(stub.Generate(_REQUEST))).text[0]
        scheduler.refused_priority = ANY_PRIORITY
        scheduler.send_load()
        async with _running(command, f"127.0.0.1:{router.port}", environment) as process:
            while not router.metrics.registry.get_sample_value(*_REFUSALS):  # noqa: ASYNC110 (there is no event to wait for)
                await asyncio.sleep(0.01)
            scheduler.refused_priority = None
            scheduler.send_load()
            assert await _output(process) == expected


@contextlib.asynccontextmanager
async def _running(command: Sequence[object], addresses: str, environment: Mapping[str, str]) -> AsyncIterator[Process]:
    """Runs the program for at most 30 s. Raises TimeoutError."""
    process = await asyncio.create_subprocess_exec(
        *map(str, command), addresses, "Once upon", "12", "5", stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, **environment},
    )  # fmt: skip
    try:
        async with asyncio.timeout(30):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _output(process: Process) -> str:
    """All that the program prints until its end. Raises AssertionError if its exit code is not 0."""
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return output.decode()
