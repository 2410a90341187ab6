"""kill -9 of any one process in mid-stream: SmolLM2 in float32 says the same tokens as without it.

Two replicas of one worker each under `octavo up`, real weights, real sockets, 12 streams, greedy and sampled; steps
are planned ahead, so that some are in flight when the process dies.
"""

import asyncio
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import tenacity

from octavo import AsyncClient, SamplingParams
from octavo.results import Delta, Generation
from tests.support.up import Up, free_port

NUM_STREAMS = 12
NUM_TOKENS = 48
PROMPTS = [f"Tell me, in a few sentences, about the number {number}." for number in range(NUM_STREAMS)]
SAMPLING = [
    SamplingParams(
        temperature=0.8 * (number % 2), top_p=0.9, seed=number, max_tokens=NUM_TOKENS, ignore_eos=True, n=1 + number % 2
    )
    for number in range(NUM_STREAMS)
]
# A stream has begun once each of its choices has this many tokens.
BEGUN = 4


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with Up(
        tmp_path_factory.mktemp("faults"), "--data-parallel-size=2", "--dtype=float32", "--kv-cache-memory=0.1",
        "--max-num-seqs=16", "--worker-threads=1", "--max-steps-in-flight=2", "--preemption-mode=swap",
        "--swap-space=0.05", real=True, metrics_port=free_port(),
    ) as up:  # fmt: skip
        up.wait_for("serving; Ctrl-C to stop")
        # With few cores the second replica comes after the first answer.
        up.wait_for("ready for epoch", count=2)
        yield up


@pytest.fixture
async def client(up: Up) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(f"localhost:{up.port}", timeout=120) as client:
        yield client


async def run(client: AsyncClient, when_begun: Callable[[], None]) -> list[Generation]:
    """All streams at once; `when_begun` is called when every one of them is under way, and none has ended."""
    begun = asyncio.Barrier(NUM_STREAMS + 1)

    async def one(index: int) -> Generation:
        messages = [{"role": "user", "content": PROMPTS[index]}]
        async with client.stream(messages, SAMPLING[index]) as stream:
            counts = dict.fromkeys(range(SAMPLING[index].n), 0)
            waited = False
            async for event in stream:
                if isinstance(event, Delta):
                    counts[event.index] += len(event.token_ids)
                    if not waited and min(counts.values()) >= BEGUN:
                        assert max(counts.values()) < NUM_TOKENS, "a choice ended before its sibling began"
                        waited = True
                        await begun.wait()
            return stream.generation

    async def act() -> None:
        await begun.wait()
        when_begun()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(act())
        streams = [tasks.create_task(one(index)) for index in range(NUM_STREAMS)]
    return [stream.result() for stream in streams]


def tokens(results: list[Generation]) -> list[list[tuple[int, ...]]]:
    return [[choice.token_ids for choice in each.choices] for each in results]


def text(results: list[Generation]) -> list[list[str]]:
    return [[choice.text for choice in each.choices] for each in results]


@pytest.fixture(scope="module")
def undisturbed(up: Up) -> list[Generation]:
    async def all_streams() -> list[Generation]:
        async with AsyncClient(f"localhost:{up.port}", timeout=120) as client:
            return await run(client, lambda: None)

    return asyncio.run(all_streams())


@tenacity.retry(wait=tenacity.wait_fixed(0.2), stop=tenacity.stop_after_delay(60))
def wait_until_ready(up: Up) -> None:
    """Both replicas have come back, as the router sees it."""
    with urllib.request.urlopen(f"http://127.0.0.1:{up.metrics_port}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    assert sum(line.startswith("octavo_replica_ready{") and line.endswith(" 1.0") for line in lines) == 2


@pytest.mark.parametrize("module", ["worker", "scheduler", "router"])
async def test_streams_survive(up: Up, client: AsyncClient, undisturbed: list[Generation], module: str) -> None:
    victim = up.child(module)
    results = await run(client, victim.kill)
    assert not victim.is_running()
    assert tokens(results) == tokens(undisturbed)
    assert text(results) == text(undisturbed)
    assert all(choice.exact for each in results for choice in each.choices)
    assert [each.usage and each.usage.completion_tokens for each in results] == [
        NUM_TOKENS * len(each.choices) for each in results
    ]
    up.wait_for("was killed by SIGKILL; starting it again")
    wait_until_ready(up)
