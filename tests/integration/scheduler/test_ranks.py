"""Replicas of several ranks: which rank failed, which others it brings down; streams go on exactly. Real sockets."""

import asyncio
import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from configs.options import Options
from protos import step_pb2
from runtime.wire import heartbeat_endpoint, rank_identity
from scheduler.ranks import epochs as epochs_module
from scheduler.ranks import liveness as liveness_module
from tests.fakes.hash_runner import HashModel
from tests.fakes.worker import FakeWorker
from tests.support.peer import Peer
from tests.support.scheduler.scheduling import (
    TIMEOUT,
    RouterEnd,
    make_options,
    running_scheduler,
    running_worker,
    worker_process,
)
from tests.support.scheduler.steps import result_columns
from worker.errors import StepError

PROMPT = list(range(20, 60))


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return make_options(tmp_path, tensor_parallel_size=2)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's cause may come long after its consequence: on a busy machine a rank that ends here closes its connection
    seconds after it has left its group, where a process that dies does both at once."""
    monkeypatch.setattr(epochs_module, "_CAUSE_WAIT_S", TIMEOUT)


class Log(logging.Handler):
    """The scheduler's log."""

    def __init__(self) -> None:
        super().__init__()
        self._messages: list[str] = []
        self._grown = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self._grown:
            self._messages.append(record.getMessage())
            self._grown.notify_all()

    @property
    def causes(self) -> list[str]:
        """The reasons why epochs ended, in order."""
        with self._grown:
            return [text.partition(" has ended: ")[2] for text in self._messages if " has ended: " in text]

    async def wait_for(self, words: str) -> None:
        def wait() -> bool:
            with self._grown:
                return self._grown.wait_for(lambda: any(words in text for text in self._messages), TIMEOUT)

        assert await asyncio.to_thread(wait), f"no message contains {words!r}"


@pytest.fixture
def log() -> Iterator[Log]:
    logger, log = logging.getLogger("octavo.scheduler"), Log()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(log)
    yield log
    logger.removeHandler(log)
    logger.setLevel(level)


class Ranks(ExitStack):
    """Two scripted ranks, each connected under the identity that its last Reset asked for."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self._endpoint, self._model = options.step_address(0), HashModel().info(options)
        self.peers: dict[int, Peer] = {}
        self.callback(lambda: [self.kill(rank) for rank in list(self.peers)])

    def start(self, rank: int, *, instance: int) -> None:
        peer = self.peers[rank] = Peer(self._endpoint, b"join-%d-%d" % (rank, instance))
        peer.say_hello(instance, rank=rank, world_size=2)

    def kill(self, rank: int) -> None:
        self.peers.pop(rank).__exit__()

    async def follow(self, rank: int) -> step_pb2.Reset:
        """Waits for the rank's next Reset and connects as it asks."""
        reset = await self.peers[rank].expect("reset")
        self.kill(rank)
        self.peers[rank] = Peer(self._endpoint, rank_identity(reset.epoch, rank))
        return reset

    async def begin(self) -> step_pb2.Reset:
        """Both ranks follow a Reset and send Ready."""
        reset, other = [await self.follow(rank) for rank in (0, 1)]
        assert (reset.epoch, reset.rendezvous) == (other.epoch, other.rendezvous)
        for rank, peer in self.peers.items():
            peer.say_ready(reset.epoch, self._model, rank=rank)
        return reset

    def fail(self, rank: int, epoch: int, message: str, *, is_consequence: bool = False) -> None:
        failure = step_pb2.Failure(epoch=epoch, rank=rank, message=message, is_consequence=is_consequence)
        self.peers[rank].send(step_pb2.WorkerToScheduler(failure=failure))


@pytest.mark.parametrize("mortal", [0, 1])
@pytest.mark.parametrize("steps", [1, 3])
async def test_all_ranks_compute_all_steps_and_one_that_ends_costs_one_epoch(
    options: Options, mortal: int, steps: int, log: Log
) -> None:
    options = options.model_copy(update={"max_steps_in_flight": steps})
    model = HashModel()
    async with (
        running_scheduler(options) as server,
        RouterEnd(server.address) as router,
        running_worker(options, rank=1 - mortal, model=HashModel(num_blocks=100)) as survivor,
    ):
        # Simulates a death: its connections close while the other rank is in a step.
        first = FakeWorker(options, rank=mortal, model=HashModel(num_blocks=90)).start()
        groups = [await router.submit([30 + i, *PROMPT], max_tokens=150, seed=i) for i in range(4)]
        assert router.welcomes[0].model.num_blocks == 90
        await router.wait_for(lambda: all(len(tokens) > 5 for tokens in router.tokens.values()))
        await asyncio.to_thread(first.stop)
        await router.wait_for(lambda: not router.loads[-1].workers_ready)
        async with running_worker(options, rank=mortal, model=HashModel(num_blocks=95)) as second:
            for i, group in enumerate(groups):
                await router.finish(group)
                assert router.tokens[group, 0] == model.generate([30 + i, *PROMPT], 150, seed=i)
            assert [welcome.model.num_blocks for welcome in router.welcomes] == [90, 95]
            assert router.welcomes[1].epoch == router.welcomes[0].epoch + 1
            files = [path.name for path in options.runtime_dir.glob("rendezvous*")]
            assert files == [f"rendezvous-0-{router.welcomes[1].epoch}"]
            await router.wait_idle()
        assert survivor.runner.num_steps >= second.runner.num_steps > 0
        # The scheduler sees the end of the second rank before it is stopped itself.
        await router.wait_for(lambda: not router.loads[-1].workers_ready)
    assert not list(options.runtime_dir.glob("rendezvous*"))
    assert len(log.causes) == 2, "two causes are expected, the second from the end of the second rank"
    assert log.causes[0].startswith(f"rank {mortal} ")
    invalid = server.step_loop.metrics.registry.get_sample_value("octavo_invalid_messages_total")
    assert not invalid, "only one rank may send results"


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGKILL, "has disconnected"), (signal.SIGSTOP, "has been silent for")]
)
async def test_a_rank_that_is_killed_or_stopped_is_named_and_streams_go_on_exactly(
    tmp_path: Path, number: signal.Signals, words: str, log: Log
) -> None:
    # The other rank stays alive and waits for it within a step.
    options = make_options(tmp_path, tensor_parallel_size=2, heartbeat_timeout=3.0)
    async with (
        running_scheduler(options) as server,
        running_worker(options, rank=0),
        RouterEnd(server.address) as router,
    ):
        with worker_process(options, "--rank=1", "--step-seconds=0.002") as mortal:
            group = await router.submit(PROMPT, max_tokens=150)
            await router.wait_for(lambda: len(router.tokens[group, 0]) > 5)
            mortal.send_signal(number)
            await router.wait_for(lambda: not router.loads[-1].workers_ready)
            assert log.causes[0].startswith(f"rank 1 (pid {mortal.pid}) {words}")
        async with running_worker(options, rank=1):
            await router.finish(group)
            await router.wait_for(lambda: len(router.welcomes) == 2)
        assert router.tokens[group, 0] == HashModel().generate(PROMPT, 150)


@pytest.mark.parametrize("failure_first", [True, False])
async def test_a_death_is_one_failure_though_the_other_rank_reports_one_too(
    options: Options, failure_first: bool, log: Log
) -> None:
    async with running_scheduler(options) as server, RouterEnd(server.address) as router:
        with Ranks(options) as ranks:
            ranks.start(0, instance=1)
            group = 0
            for life in range(3):
                ranks.start(1, instance=10 + life)
                epoch = (await ranks.begin()).epoch
                group = group or await router.submit(PROMPT, max_tokens=4)
                plans = [await ranks.peers[rank].expect("plan") for rank in (0, 1)]
                assert plans[0] == plans[1]
                await router.wait_for(lambda: router.loads[-1].workers_ready)
                if failure_first:
                    ranks.fail(0, epoch, f"a gather in life {life}", is_consequence=True)
                    await log.wait_for(f"a gather in life {life}")
                    ranks.kill(1)
                    await router.wait_for(lambda: not router.loads[-1].workers_ready)
                else:
                    ranks.kill(1)
                    await router.wait_for(lambda: not router.loads[-1].workers_ready)
                    ranks.fail(0, epoch, f"a gather in life {life}", is_consequence=True)
                    await log.wait_for(f"a gather in life {life}")
                # If each death counted twice, the request would have ended at the second one.
                assert not router.finishes
            ranks.start(1, instance=20)
            await ranks.begin()
            finish = await router.finish(group)
            assert finish.message == "the workers failed in each of 3 steps that computed it"
            assert log.causes == ["rank 1 (pid 0) has disconnected"] * 3


@pytest.mark.parametrize("explained", [True, False])
async def test_what_the_other_rank_says_is_the_cause_if_it_says_something(
    options: Options, explained: bool, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not explained:
        monkeypatch.setattr(epochs_module, "_CAUSE_WAIT_S", 0.05)
    async with running_scheduler(options) as server, RouterEnd(server.address) as router:
        with Ranks(options) as ranks:
            ranks.start(0, instance=1)
            ranks.start(1, instance=2)
            epoch = (await ranks.begin()).epoch
            await router.wait_for(lambda: router.loads and router.loads[-1].workers_ready)
            ranks.fail(0, epoch, "a gather failed", is_consequence=True)
            await log.wait_for("a gather failed")
            if explained:
                ranks.fail(1, epoch, "out of memory")
            assert (await ranks.begin()).epoch == epoch + 1
            expected = "rank 1 (pid 0) failed: out of memory" if explained else "rank 0 (pid 0) failed: a gather failed"
            assert log.causes == [expected]


async def test_a_rank_that_is_stuck_in_a_step_misses_no_reset(
    options: Options, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without pauses between epochs, the next one would begin as soon as the ranks are there.
    monkeypatch.setattr(epochs_module, "_FIRST_PAUSE_S", epochs_module._LONGEST_PAUSE_S)
    # It has not read the first Reset when that epoch ends: another Reset would go to an identity it does not have yet.
    async with running_scheduler(options) as server, RouterEnd(server.address) as router:
        with Ranks(options) as ranks:
            ranks.start(0, instance=1)
            ranks.start(1, instance=2)
            epoch = (await ranks.begin()).epoch
            await router.wait_for(lambda: router.loads and router.loads[-1].workers_ready)
            ranks.kill(1)
            ranks.start(1, instance=3)
            assert (await ranks.follow(1)).epoch == epoch + 1
            ranks.kill(1)
            with monkeypatch.context() as brief:
                brief.setattr(liveness_module, "_REENTRY_GRACE_S", 0.1)
                await log.wait_for(f"epoch {epoch + 1} has ended")
            ranks.start(1, instance=4)
            await log.wait_for("rank 1 (pid 0) has joined")
            # Its message under the old identity belongs to an epoch that is over; it does not count as a stranger's.
            ranks.fail(0, epoch, "a gather failed", is_consequence=True)
            assert (await ranks.follow(0)).epoch == epoch + 1
            assert (await ranks.begin()).epoch == epoch + 2
            await router.wait_for(lambda: router.loads[-1].workers_ready)
    assert not server.step_loop.metrics.registry.get_sample_value("octavo_invalid_messages_total")


async def test_results_of_other_ranks_than_the_first_are_refused(options: Options, log: Log):
    async with running_scheduler(options) as server, RouterEnd(server.address) as router:
        with Ranks(options) as ranks:
            ranks.start(0, instance=1)
            ranks.start(1, instance=2)
            epoch = (await ranks.begin()).epoch
            group = await router.submit(PROMPT, max_tokens=1)
            plan = await ranks.peers[0].expect("plan")
            for rank, token in ((1, 77), (0, 55)):
                columns = result_columns([plan.new_rows[0].sequence], [0], [token])
                result = step_pb2.StepResult(epoch=epoch, step=plan.step, **columns)
                ranks.peers[rank].send(step_pb2.WorkerToScheduler(result=result))
                if rank:
                    await log.wait_for("a result, which only rank 0 may send")
            await router.finish(group)
            assert router.tokens[group, 0] == [55]
        assert server.step_loop.metrics.registry.get_sample_value("octavo_invalid_messages_total") == 1


async def test_a_step_that_does_not_return_names_the_rank_that_is_silent(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness_module, "_MISSED_BEATS_S", 1.0)
    options = make_options(tmp_path, tensor_parallel_size=2, step_timeout=1.5)
    async with running_scheduler(options) as server, RouterEnd(server.address) as router:
        with Ranks(options) as ranks, Peer(heartbeat_endpoint(options.step_address(0)), b"beats") as beats:
            ranks.start(0, instance=1)
            ranks.start(1, instance=2)
            await ranks.begin()
            await router.submit(PROMPT, max_tokens=4)
            await ranks.peers[0].expect("plan")
            ended = asyncio.create_task(log.wait_for("has ended"))
            while not ended.done():
                # Only rank 0 has a heartbeat.
                beats.socket.send(step_pb2.Heartbeat(rank=0, instance=1).SerializeToString())
                await asyncio.wait([ended], timeout=0.02)
    assert "step 1 has not returned" in log.causes[0]
    assert "rank 1 (pid 0) has been silent for" in log.causes[0]
    assert "rank 0" not in log.causes[0]


async def test_a_step_that_fails_at_one_rank_is_told_once(options: Options, log: Log) -> None:
    # That rank leaves the group; the other fails because of it, and both continue in the next epoch.
    failures = iter([True])

    def fail(plan: step_pb2.StepPlan) -> None:
        if plan.step == 3 and next(failures, False):
            raise StepError("out of memory")

    async with (
        running_scheduler(options) as server,
        running_worker(options, rank=0),
        running_worker(options, rank=1, before_step=fail),
        RouterEnd(server.address) as router,
    ):
        group = await router.submit(PROMPT, max_tokens=30)
        await router.finish(group)
        assert router.tokens[group, 0] == HashModel().generate(PROMPT, 30)
        assert len(router.welcomes) == 2
        [cause] = log.causes
        assert cause.startswith("rank 1 ")
        assert "out of memory" in cause
