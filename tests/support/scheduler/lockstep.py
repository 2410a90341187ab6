"""Replicas in lockstep: schedulers in this process, fake workers, real sockets."""

import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

from configs.options import Options
from protos import scheduler_pb2
from scheduler.server import SchedulerServer
from tests.fakes.hash_runner import HashModel
from tests.fakes.worker import FakeWorker
from tests.support.scheduler.scheduling import RouterEnd, make_options, running_scheduler, running_worker

PROMPT = list(range(20, 50))


def make_lockstep_options(directory: Path, **changes: object) -> Options:
    return make_options(directory, enable_expert_parallel=True, data_parallel_size=2, **changes)


class Replica:
    """A scheduler with its ranks, and a router's end of a Session."""

    def __init__(self, options: Options, number: int) -> None:
        self.options, self.number = options, number
        self._stack, self._of_scheduler = AsyncExitStack(), AsyncExitStack()
        self.workers: list[FakeWorker] = []
        self.groups: dict[int, int] = {}

    async def start_scheduler(self) -> None:
        self.server: SchedulerServer = await self._of_scheduler.enter_async_context(
            running_scheduler(self.options, self.number)
        )
        self.router = await self._of_scheduler.enter_async_context(RouterEnd(self.server.address))

    async def start_worker(self, rank: int, **settings: object) -> None:
        worker = running_worker(self.options, replica=self.number, rank=rank, **settings)
        self.workers[rank : rank + 1] = [await self._stack.enter_async_context(worker)]

    async def stop_scheduler(self) -> None:
        """Simulates the scheduler's death: its workers keep running."""
        self.server.step_loop._connections.workers.close = lambda reason: None
        await self._of_scheduler.aclose()

    async def close_scheduler(self) -> None:
        await self._of_scheduler.aclose()

    async def close(self) -> None:
        await self.close_scheduler()
        await self._stack.aclose()

    async def begin(self, *, count: int = 2, max_tokens: int = 120) -> None:
        """Submits streams and waits until each has some tokens."""
        for seed in range(count):
            prompt = [100 + seed, *PROMPT]
            group = await self.router.submit(prompt, max_tokens=max_tokens, seed=seed + 10 * self.number)
            self.groups[group] = seed
        await self.router.wait_for(lambda: all(len(self.router.tokens[group, 0]) > 3 for group in self.groups))

    async def finish(self) -> None:
        """Waits for all streams; asserts that each has the same tokens as alone."""
        for group, seed in self.groups.items():
            await self.router.finish(group)
            tokens = self.router.tokens[group, 0]
            assert tokens == HashModel().generate([100 + seed, *PROMPT], len(tokens), seed=seed + 10 * self.number)
        self.groups.clear()

    async def welcome(self, count: int) -> scheduler_pb2.Welcome:
        """Waits for the `count`th Welcome of this Session."""
        await self.router.wait_for(lambda: len(self.router.welcomes) >= count)
        return self.router.welcomes[count - 1]

    async def wait_for_status(self, words: str) -> None:
        """Waits until /health contains the words; checks it at each Load, which comes every second."""
        await self.router.wait_for(lambda: words in self.server.step_loop.status.health[1])

    def metric(self, name: str) -> float:
        value = self.server.step_loop.metrics.registry.get_sample_value(f"octavo_{name}_total")
        assert value is not None
        return value


@contextlib.asynccontextmanager
async def running_replicas(options: Options, *, with_workers: bool = True) -> AsyncIterator[tuple[Replica, Replica]]:
    replicas = Replica(options, 0), Replica(options, 1)
    try:
        for each in replicas:
            await each.start_scheduler()
            for rank in range(options.world_size * with_workers):
                await each.start_worker(rank)
        yield replicas
    finally:
        for each in replicas:
            await each.close_scheduler()
        # One may wait in a step for another, and ends with it.
        for worker in (worker for each in replicas for worker in each.workers):
            worker.request_stop()
        for each in replicas:
            await each.close()
