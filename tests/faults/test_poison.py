"""Requests that make the worker fail in every step: each ends with ERROR, and other streams continue exactly.

The worker has no weights, runs as a process and is started again when it ends.
"""

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from configs.options import Options
from protos import inference_pb2
from runtime.progress.watchdog import EXIT_HUNG
from tests.fakes.hash_runner import DEADLY_TOKEN, ENDLESS_TOKEN, RAISING_TOKEN, HashModel
from tests.support.repository import ROOT
from tests.support.scheduler.scheduling import RouterEnd, make_options, running_scheduler, running_worker
from tests.support.up import environment

PROMPT = list(range(20, 60))
NUM_STREAMS, NUM_TOKENS = 6, 60
ERROR = inference_pb2.FINISH_REASON_ERROR


@dataclasses.dataclass
class Lives:
    """The successive worker processes of one rank."""

    pid: int = 0
    # Negative: killed by that signal.
    exit_codes: list[int] = dataclasses.field(default_factory=list)
    errors: str = ""


@contextlib.asynccontextmanager
async def restarted_worker(options: Options) -> AsyncIterator[Lives]:
    lives = Lives()
    flags = [
        f"--{name}={getattr(options, name)}"
        for name in (
            "runtime_dir",
            "max_num_seqs",
            "max_num_batched_tokens",
            "block_size",
            "served_model_name",
            "step_timeout",
        )
    ]

    async def live() -> None:
        while True:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "tests.fakes.worker",
                *flags,
                "--step-seconds=0.002",
                cwd=ROOT,
                env=environment(),
                stderr=subprocess.PIPE,
            )
            lives.pid = process.pid
            try:
                _, errors = await process.communicate()
            except asyncio.CancelledError:
                process.kill()
                await process.communicate()
                raise
            assert process.returncode is not None
            lives.exit_codes.append(process.returncode)
            lives.errors += errors.decode()

    task = asyncio.create_task(live())
    try:
        yield lives
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def finish_all(router: RouterEnd, poison: int) -> str:
    """Submits a poisoned prompt among others. Returns its error message; asserts that the others are exact."""
    groups = [await router.submit([30 + i, *PROMPT], max_tokens=NUM_TOKENS, seed=i) for i in range(NUM_STREAMS)]
    await router.wait_for(lambda: all(router.tokens[group, 0] for group in groups))
    poisoned = await router.submit([*PROMPT, poison], max_tokens=NUM_TOKENS)
    finish = await router.finish(poisoned)
    assert finish.reason == ERROR
    assert not router.tokens[poisoned, 0]
    for i, group in enumerate(groups):
        assert (await router.finish(group)).reason == inference_pb2.FINISH_REASON_LENGTH
        assert router.tokens[group, 0] == HashModel().generate([30 + i, *PROMPT], NUM_TOKENS, seed=i)
    return finish.message


MESSAGE = "the workers failed in each of 3 steps that computed it"


@pytest.mark.parametrize("steps", [1, 3])
async def test_one_that_raises_costs_three_epochs_and_no_process(tmp_path: Path, steps: int):
    options = make_options(tmp_path, max_steps_in_flight=steps)
    async with running_scheduler(options) as server, running_worker(options), RouterEnd(server.address) as router:
        assert await finish_all(router, RAISING_TOKEN) == MESSAGE
        assert len(router.welcomes) == 4
        core = server.step_loop.core
        assert core is not None
        core.check_integrity()


@pytest.mark.parametrize("steps", [1, 3])
async def test_one_that_kills_its_worker_costs_three_processes(tmp_path: Path, steps: int):
    options = make_options(tmp_path, max_steps_in_flight=steps)
    async with (
        running_scheduler(options) as server,
        restarted_worker(options) as lives,
        RouterEnd(server.address) as router,
    ):
        assert await finish_all(router, DEADLY_TOKEN) == MESSAGE
    assert lives.exit_codes == [-signal.SIGKILL] * 3


async def test_one_whose_step_never_returns_ends_as_well(tmp_path: Path):
    options = make_options(tmp_path, step_timeout=0.5)
    async with (
        running_scheduler(options) as server,
        restarted_worker(options) as lives,
        RouterEnd(server.address) as router,
    ):
        assert await finish_all(router, ENDLESS_TOKEN) == MESSAGE
    # The workers end by themselves: no other process could know that they hang.
    assert lives.exit_codes == [EXIT_HUNG] * 3
    assert lives.errors.count("(step_timeout=0.5): it hangs, and this process ends") == 3
    assert "(fakes/hash_runner.py:" in lives.errors, "no stack of where it hangs"


async def test_a_worker_that_is_killed_now_and_then_is_no_requests_fault(tmp_path: Path):
    options = make_options(tmp_path)
    async with (
        running_scheduler(options) as server,
        restarted_worker(options) as lives,
        RouterEnd(server.address) as router,
    ):
        group = await router.submit(PROMPT, max_tokens=200)
        for count in range(1, 6):
            await router.wait_for(lambda count=count: len(router.tokens[group, 0]) > 20 * count)
            os.kill(lives.pid, signal.SIGKILL)
            await router.wait_for(lambda count=count: len(router.welcomes) > count)
        await router.finish(group)
        assert router.tokens[group, 0] == HashModel().generate(PROMPT, 200)
