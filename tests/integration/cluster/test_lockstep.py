"""Replicas in lockstep: they share epochs, waves and failures; streams continue exactly.

Schedulers in this process, fake workers, real sockets.
"""

import asyncio
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.hash_runner import RAISING_TOKEN
from tests.fakes.worker import FakeWorker
from tests.support.scheduler.lockstep import PROMPT, Replica, make_lockstep_options, running_replicas
from tests.support.scheduler.scheduling import TIMEOUT, Gate, running_scheduler


class Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        self._grown = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self._grown:
            self.messages.append(record.getMessage())
            self._grown.notify_all()

    async def wait_for(self, words: str, *, count: int = 1) -> None:
        def wait() -> bool:
            with self._grown:
                return self._grown.wait_for(lambda: sum(words in text for text in self.messages) >= count, TIMEOUT)

        assert await asyncio.to_thread(wait), f"no message contains {words!r}: {self.messages}"


@pytest.fixture
def log() -> Iterator[Log]:
    logger, log = logging.getLogger("octavo.scheduler"), Log()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(log)
    yield log
    logger.removeHandler(log)
    logger.setLevel(level)


async def resting(*replicas: Replica) -> None:
    """Waits until nobody computes a step for a while."""
    before: list[int] = []
    while (now := [worker.runner.num_steps for each in replicas for worker in each.workers]) != before:
        before = now
        await asyncio.sleep(0.2)


@pytest.mark.parametrize(("tensor", "steps"), [(1, 1), (2, 2)])
async def test_all_replicas_compute_each_step_and_rest_together(tmp_path: Path, tensor: int, steps: int) -> None:
    options = make_lockstep_options(tmp_path, tensor_parallel_size=tensor, max_steps_in_flight=steps)
    async with running_replicas(options) as (first, second):
        for busy in ([first, second], [second], [first]):
            for each in busy:
                await each.begin(max_tokens=30)
            for each in busy:
                await each.finish()
            await resting(first, second)
        assert (await first.welcome(1)).epoch == (await second.welcome(1)).epoch
        num_steps = [worker.runner.num_steps for each in (first, second) for worker in each.workers]
        # One second without a step: Loads come once a second.
        loads = [len(each.router.loads) for each in (first, second)]
        for each, count in zip((first, second), loads, strict=True):
            await each.router.wait_for(lambda each=each, count=count: len(each.router.loads) > count)
        later = [worker.runner.num_steps for each in (first, second) for worker in each.workers]
        # Steps in flight when the last stream ended were completed.
        assert max(later) - min(num_steps) < 2 * steps + 1
        assert len(set(later)) == 1
        assert first.metric("lockstep_waves") == second.metric("lockstep_waves") >= 3
        assert min(first.metric("lockstep_empty_steps"), second.metric("lockstep_empty_steps")) > 20
        assert first.server.step_loop.status.health[0]
    assert not list(options.runtime_dir.glob("rendezvous*"))


async def test_a_rank_that_dies_costs_all_one_epoch_and_its_replica_is_named(tmp_path: Path, log: Log) -> None:
    async with running_replicas(make_lockstep_options(tmp_path, max_steps_in_flight=2)) as (first, second):
        for each in (first, second):
            await each.begin()
        await asyncio.to_thread(second.workers[0].stop)
        for each in (first, second):
            await each.router.wait_for(lambda each=each: not each.router.loads[-1].workers_ready)
        await log.wait_for("has ended: replica 1: rank 0 (pid ")
        await log.wait_for("has ended in all replicas: replica 1: rank 0 ")
        await first.wait_for_status("; all replicas wait for replica 1 (waiting for rank 0 of 1)")
        await second.start_worker(0)
        for each in (first, second):
            await each.finish()
        assert (await first.welcome(2)).epoch == (await second.welcome(2)).epoch
        assert len(first.router.welcomes) == len(second.router.welcomes) == 2


@pytest.mark.parametrize("mortal", [0, 1])
async def test_a_scheduler_that_goes_is_waited_for(tmp_path: Path, mortal: int, log: Log) -> None:
    options = make_lockstep_options(tmp_path, heartbeat_timeout=20)
    async with running_replicas(options) as replicas:
        gone, other = replicas[mortal], replicas[1 - mortal]
        for each in replicas:
            await each.begin()
        await gone.stop_scheduler()
        await other.router.wait_for(lambda: not other.router.loads[-1].workers_ready)
        who = "the coordinator, in the scheduler of replica 0," if mortal == 0 else "the scheduler of replica 1"
        await log.wait_for(f"has ended: {who} has disconnected")
        await other.wait_for_status(
            "; all replicas wait for the coordinator, in the scheduler of replica 0, which is not connected"
            if mortal == 0
            else "; all replicas wait for replica 1, whose scheduler is not connected"
        )
        gone.groups.clear()
        await gone.start_scheduler()
        await other.finish()
        await gone.begin(max_tokens=20)
        await gone.finish()
        assert (await gone.welcome(1)).epoch == (await other.welcome(2)).epoch


@pytest.mark.parametrize("mortal", [0, 1])
async def test_a_rank_that_waits_in_a_step_when_its_scheduler_goes_is_set_free(tmp_path: Path, mortal: int) -> None:
    # The scheduler dies after it has sent a step that the other one does not send any more.
    options = make_lockstep_options(tmp_path, heartbeat_timeout=20)
    async with running_replicas(options) as replicas:
        gone, other = replicas[mortal], replicas[1 - mortal]
        for each in replicas:
            await each.begin()
        other.server.step_loop._pipeline.schedule = list
        await resting(*replicas)
        await gone.stop_scheduler()
        await other.router.wait_for(lambda: not other.router.loads[-1].workers_ready)
        del other.server.step_loop._pipeline.schedule
        gone.groups.clear()
        await gone.start_scheduler()
        await other.finish()
        await gone.begin(max_tokens=20)
        await gone.finish()


async def test_only_requests_of_the_replica_whose_ranks_fail_are_blamed(tmp_path: Path, log: Log) -> None:
    async with running_replicas(make_lockstep_options(tmp_path)) as (first, second):
        for each in (first, second):
            await each.begin(max_tokens=300)
        group = await second.router.submit([RAISING_TOKEN, *PROMPT], max_tokens=8)
        assert "failed in each of 3 steps" in (await second.router.finish(group)).message
        for each in (first, second):
            await each.finish()
        # Requests of the other replica were also in the steps that failed, but are not blamed.
        assert len([text for text in log.messages if "are computed alone" in text]) == 1
        assert len(first.router.welcomes) == 4


async def test_requests_that_wait_for_a_rank_of_another_replica_are_not_blamed(tmp_path: Path, log: Log) -> None:
    # Nobody can tell in which replica a rank is stuck as long as it need not be started again. A second step in flight
    # would be of an epoch that has ended when the gate holds it.
    options, gate = make_lockstep_options(tmp_path, step_timeout=0.25, max_steps_in_flight=1), Gate(first=3)
    async with running_replicas(options, with_workers=False) as (first, second):
        await first.start_worker(0)
        await second.start_worker(0, before_step=gate)
        streams = asyncio.gather(first.begin(count=1), second.begin(count=1))
        for life in (1, 2):
            await log.wait_for(" has not returned for", count=3 * life)
            gate.open()
            await log.wait_for("begins in all 2 replicas", count=life + 1)
            gate.first = 3 if life == 1 else 1000
            gate.close()
        await streams
        for each in (first, second):
            await each.finish()
        assert not [text for text in log.messages if "are computed alone" in text]


async def test_an_epoch_that_never_gets_ready_ends_for_all(tmp_path: Path, log: Log) -> None:
    # The first replica's rank waits at the rendezvous; the second's fails while it loads.
    options, may_go_on = make_lockstep_options(tmp_path), threading.Event()

    def load() -> None:
        assert may_go_on.wait(TIMEOUT)
        raise RuntimeError("out of memory")

    async with running_replicas(options, with_workers=False) as (first, second):
        await first.start_worker(0)
        mortal = FakeWorker(options, 1, load=load).start()
        # The coordinator and both schedulers log it.
        await log.wait_for(" begins", count=3)
        may_go_on.set()
        assert await asyncio.to_thread(mortal.join) == 1
        await log.wait_for("has ended: replica 1: rank 0 (pid ")
        await second.start_worker(0)
        await first.begin(count=1, max_tokens=10)
        await first.finish()


async def test_a_scheduler_that_drains_stays_while_others_need_it(tmp_path: Path) -> None:
    options = make_lockstep_options(tmp_path)
    async with running_replicas(options) as (first, second):
        await first.begin(max_tokens=150)
        second.server.drain()
        await first.finish()
        assert len(first.router.welcomes) == 1
        assert await asyncio.wait_for(second.server.wait(), TIMEOUT) is None


async def test_replicas_with_other_options_are_refused(tmp_path: Path) -> None:
    options = make_lockstep_options(tmp_path)
    async with running_scheduler(options):
        other = options.model_copy(update={"max_steps_in_flight": 3})
        async with running_scheduler(other, 1) as second:
            cause = await asyncio.wait_for(second.wait(), TIMEOUT)
            assert cause == (
                "replica 0 refuses this one: max_steps_in_flight is 3 at replica 1 but 2 at replica 0: "
                "give both the same"
            )
            assert second.step_loop.failed_for_good
