"""The loop of one of two ranks: how it waits for the other, and what it reports when the other leaves. The test plays
the scheduler and the other rank."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import tenacity

from configs.options import Options
from protos import inference_pb2, step_pb2
from tests.fakes.socket_group import SocketGroup, meet
from tests.fakes.step_scheduler import StepScheduler
from tests.fakes.worker import FakeWorker
from tests.support.scheduler.scheduling import make_options
from tests.support.scheduler.steps import said

PROBE = step_pb2.SchedulerToWorker(probe=step_pb2.Probe())
NEW_ROW = step_pb2.NewRow(
    sequence=1,
    token_ids=[20, 21, 22],
    num_prompt_tokens=3,
    block_ids=[1],
    sampling=inference_pb2.SamplingParams(seed=5),
)
PREFILL = step_pb2.StepPlan(new_rows=[NEW_ROW], rows=[0], num_tokens=[3])


@pytest.fixture
def options(tmp_path: Path) -> Options:
    (tmp_path / "run").mkdir(mode=0o700)
    return make_options(tmp_path, tensor_parallel_size=2)


@pytest.fixture
def worker(options: Options) -> Iterator[FakeWorker]:
    worker = FakeWorker(options, rank=0).start()
    yield worker
    worker.stop()


def send_reset(scheduler: StepScheduler, options: Options, epoch: int, identity: bytes | None = None) -> None:
    """identity: as for StepScheduler.send_reset."""
    scheduler.send_reset(epoch, identity, rendezvous=f"file:{options.runtime_dir}/{epoch}")
    scheduler.epoch = epoch


@tenacity.retry(wait=tenacity.wait_fixed(0.005), stop=tenacity.stop_after_delay(60))
def wait_until_it_is_there(scheduler: StepScheduler, options: Options) -> None:
    assert (options.runtime_dir / str(scheduler.epoch)).exists()
    # Fails if the rank has not connected yet.
    scheduler.send(PROBE)


def join_it(scheduler: StepScheduler, options: Options) -> SocketGroup:
    """Joins the group as rank 1."""
    group = meet(f"file:{options.runtime_dir}/{scheduler.epoch}", 1, 2, lambda: None)
    assert scheduler.expect("ready").epoch == scheduler.epoch
    return group


@pytest.mark.usefixtures("worker")
def test_a_rank_waits_through_probes_and_says_that_a_failed_collective_is_not_its_failure(options: Options) -> None:
    with StepScheduler(options.step_address(0)) as scheduler:
        identity, hello = scheduler.expect_hello()
        assert hello.world_size == 2
        send_reset(scheduler, options, 1, identity)
        wait_until_it_is_there(scheduler, options)
        scheduler.send(PROBE)
        group = join_it(scheduler, options)
        scheduler.send_plan(PREFILL)
        group.meet_in_step(1, 0)
        assert len(said(scheduler.expect("result")).token_ids) == 1

        scheduler.send_plan(step_pb2.StepPlan(freed_rows=[0], new_rows=[NEW_ROW], rows=[0], num_tokens=[3]))
        group.leave()
        failure = scheduler.expect("failure")
        assert (failure.is_consequence, failure.permanent) == (True, False)
        assert "step 2 failed: a collective" in failure.message

        # The first rendezvous that this rank gets is not the one that the other rank gets.
        send_reset(scheduler, options, 2)
        wait_until_it_is_there(scheduler, options)
        send_reset(scheduler, options, 3)
        join_it(scheduler, options).leave()


@pytest.mark.usefixtures("worker")
def test_a_rank_that_waits_says_hello_to_a_scheduler_that_was_restarted(options: Options) -> None:
    # The other rank may have died along with the scheduler; then it never comes to the old scheduler's rendezvous.
    with StepScheduler(options.step_address(0), instance=1) as scheduler:
        identity, _ = scheduler.expect_hello()
        send_reset(scheduler, options, 1, identity)
        wait_until_it_is_there(scheduler, options)
    with StepScheduler(options.step_address(0), instance=2) as scheduler:
        identity, _ = scheduler.expect_hello()
        send_reset(scheduler, options, 2, identity)
        join_it(scheduler, options).leave()


def test_ranks_that_differ_in_how_many_they_are_say_so(options: Options) -> None:
    worker = FakeWorker(options, rank=0).start()
    with StepScheduler(options.step_address(0)) as scheduler:
        identity, _ = scheduler.expect_hello()
        scheduler.send_reset(1, identity)
        failure = scheduler.expect("failure")
        assert failure.permanent
        assert "world_size is 2 here" in failure.message
        assert worker.join() == 2
