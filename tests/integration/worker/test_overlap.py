"""The worker's loop with a runner whose steps overlap: which steps begin, which results are sent, which are dropped."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from protos import step_pb2
from tests.fakes.slow_runner import REFUSED_ROWS, SlowRunner
from tests.fakes.step_scheduler import StepScheduler
from tests.support.scheduler.steps import decodes, said
from tests.support.worker_loop import RunningWorker

PLAN = step_pb2.StepPlan(decode_rows=decodes(0))
REFUSED = step_pb2.StepPlan(decode_rows=REFUSED_ROWS)


@pytest.fixture
def runner() -> SlowRunner:
    return SlowRunner()


@pytest.fixture
def worker(tmp_path: Path, runner: SlowRunner) -> Iterator[RunningWorker]:
    worker = RunningWorker(f"ipc://{tmp_path}/step.sock", lambda progress: runner)
    yield worker
    worker.stop()


@pytest.fixture
def scheduler(worker: RunningWorker) -> Iterator[StepScheduler]:
    with StepScheduler(worker.endpoint) as scheduler:
        scheduler.join()
        yield scheduler


def result_step(scheduler: StepScheduler) -> int:
    """The step of the next message, which must be a correct result."""
    result = scheduler.expect("result")
    assert (result.epoch, said(result).token_ids) == (scheduler.epoch, [result.step])
    assert result.timing.total > 0
    return result.step


def test_a_step_begins_while_those_before_it_run_and_results_keep_the_order(
    worker: RunningWorker, runner: SlowRunner, scheduler: StepScheduler
):
    for _ in range(3):
        scheduler.send_plan(PLAN)
    steps = runner.wait_for_steps(3)
    # The last step counts as begun; the watchdog measures the first.
    beat = scheduler.heartbeats.wait_for(lambda beat: beat.step == 3)
    assert beat.state == step_pb2.WORKER_STATE_STEPPING
    assert (worker.status.snapshot().oldest_step, worker.status.snapshot().num_in_flight) == (1, 3)
    steps[1].finish()
    steps[0].finish()
    assert [result_step(scheduler), result_step(scheduler)] == [1, 2]
    # A result does not wait for later steps, and a plan does not wait for earlier ones.
    scheduler.send_plan(PLAN)
    runner.wait_for_steps(4)[3].finish()
    steps[2].finish()
    assert [result_step(scheduler), result_step(scheduler)] == [3, 4]
    scheduler.heartbeats.wait_for(lambda beat: beat.step == 4 and beat.state == step_pb2.WORKER_STATE_IDLE)


def test_a_plan_that_is_refused_keeps_no_earlier_result_back(runner: SlowRunner, scheduler: StepScheduler):
    for plan in (PLAN, PLAN, REFUSED, PLAN):
        scheduler.send_plan(plan)
    for step in runner.wait_for_steps(2):
        step.finish()
    assert [result_step(scheduler), result_step(scheduler)] == [1, 2]
    assert scheduler.expect("failure").message == "decode_rows: row 65535 does not exist"
    # The plan behind it was void.
    scheduler.reset(2)
    assert len(runner.wait_for_steps(2)) == 2


def test_a_step_that_fails_takes_those_begun_after_it_along(runner: SlowRunner, scheduler: StepScheduler):
    for _ in range(3):
        scheduler.send_plan(PLAN)
    first, second, third = runner.wait_for_steps(3)
    third.finish()
    second.finish(RuntimeError("an illegal memory access"))
    first.finish()
    assert result_step(scheduler) == 1
    assert scheduler.expect("failure").message == "step 2 failed: RuntimeError: an illegal memory access"
    # The next message is Ready: the third step gave no result.
    scheduler.reset(2)
    scheduler.send_plan(PLAN)
    runner.wait_for_steps(4)[3].finish()
    assert result_step(scheduler) == 1


def test_a_failure_before_a_refused_plan_is_the_one_that_is_told(runner: SlowRunner, scheduler: StepScheduler):
    scheduler.send_plan(PLAN)
    scheduler.send_plan(REFUSED)
    runner.wait_for_steps(1)[0].finish(RuntimeError("out of memory"))
    assert scheduler.expect("failure").message == "step 1 failed: RuntimeError: out of memory"
    scheduler.reset(2)


def test_a_new_epoch_waits_for_steps_of_the_old_one_and_sends_nothing_of_them(
    worker: RunningWorker, runner: SlowRunner, scheduler: StepScheduler
):
    for _ in range(2):
        scheduler.send_plan(PLAN)
    steps = runner.wait_for_steps(2)
    scheduler.send_reset(2)
    assert runner.is_resetting.wait(60)
    # The state is still STEPPING: if one of them hangs, the watchdog sees a step that hangs.
    assert worker.status.snapshot().state == step_pb2.WORKER_STATE_STEPPING
    assert worker.status.snapshot().oldest_step == 1
    for step in steps:
        step.finish()
    assert scheduler.expect("ready").epoch == 2
    assert worker.status.snapshot().num_in_flight == 0


def test_a_scheduler_that_dies_with_steps_in_flight_gets_none_of_them_afterwards(
    worker: RunningWorker, runner: SlowRunner
):
    with StepScheduler(worker.endpoint, instance=1) as scheduler:
        scheduler.join()
        scheduler.send_plan(PLAN)
        [step] = runner.wait_for_steps(1)
        scheduler.heartbeats.wait_for(lambda beat: beat.step == 1)
    with StepScheduler(worker.endpoint, instance=2) as scheduler:
        assert runner.is_resetting.wait(60)
        step.finish()
        # The worker sends Hello, and Ready at once after the Reset.
        scheduler.join(epoch=2)


@pytest.mark.parametrize("by_message", [True, False])
def test_an_end_waits_for_steps_in_flight(
    worker: RunningWorker, runner: SlowRunner, scheduler: StepScheduler, by_message: bool
):
    scheduler.send_plan(PLAN)
    [step] = runner.wait_for_steps(1)
    if by_message:
        scheduler.send(step_pb2.SchedulerToWorker(shutdown=step_pb2.Shutdown()))
    else:
        worker.wakeup.request_stop()
    assert runner.is_resetting.wait(60)
    step.finish()
    assert worker.exit_code() == 0
