"""Processes are stopped in mid-stream, as by a debugger or a frozen container: SmolLM2 gives the same tokens.

Steps are planned ahead, so that two of them, with one sequence each, are in flight when it stops.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator

import pytest

from octavo import AsyncClient, SamplingParams
from octavo.client.results import Delta, Generation
from tests.support.ports import free_ports
from tests.support.up import Up

SAMPLING = [SamplingParams(temperature=0.8, seed=seed, max_tokens=32, ignore_eos=True) for seed in range(3)]
HANG_TIMEOUT = 4.0
NAMES = {"worker": "worker 0.0", "scheduler": "scheduler 0", "router": "router"}


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with Up(
        tmp_path_factory.mktemp("up"),
        "--dtype=float32",
        "--kv-cache-memory=0.1",
        "--max-num-seqs=8",
        "--worker-threads=1",
        "--max-steps-in-flight=2",
        f"--hang-timeout={HANG_TIMEOUT:g}",
        "--max-restarts=9",
        real=True,
        metrics_port=free_ports(3),
    ) as up:
        up.wait_for("serving; Ctrl-C to stop")
        yield up


@pytest.fixture(scope="module")
def undisturbed(up: Up) -> list[tuple[int, ...]]:
    return asyncio.run(generate(up, nothing))


async def nothing() -> None:
    pass


async def generate(up: Up, fault: Callable[[], Awaitable[None]]) -> list[tuple[int, ...]]:
    """The tokens of three streams. fault: called once all have begun."""
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
        await fault()
    generations = [stream.result() for stream in streams]
    assert all(each.choices[0].exact for each in generations)
    return [each.choices[0].token_ids for each in generations]


@pytest.mark.parametrize("kinds", [("worker",), ("scheduler", "router")])
async def test_stopped_processes_are_replaced_and_streams_go_on_exactly(
    up: Up, undisturbed: list[tuple[int, ...]], kinds: tuple[str, ...]
) -> None:
    stopped = [up.child(kind) for kind in kinds]

    async def stop() -> None:
        for each in stopped:
            each.send_signal(signal.SIGSTOP)

    assert await generate(up, stop) == undisturbed
    for kind in kinds:
        up.wait_for(f"{NAMES[kind]} has made no progress for")
    assert not any(each.is_running() for each in stopped)
    assert [len(up.children_of(kind)) for kind in NAMES] == [1, 1, 1]


async def test_a_stopped_supervisor_blames_no_process_when_it_goes_on(
    up: Up, undisturbed: list[tuple[int, ...]]
) -> None:
    before = {each.pid for each in up.children()}

    async def pause() -> None:
        up.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(1.3 * HANG_TIMEOUT)
        up.process.send_signal(signal.SIGCONT)

    assert await generate(up, pause) == undisturbed
    # It has looked at all processes more than once.
    await asyncio.sleep(1.0)
    assert {each.pid for each in up.children()} == before
