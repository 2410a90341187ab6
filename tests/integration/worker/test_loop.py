"""The worker's loop over real ZeroMQ sockets, with a model without weights: it joins, fails and joins again."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from protos import inference_pb2, step_pb2
from runtime.wire import rank_identity
from tests.fakes.fake_runner import fake_runner
from tests.fakes.step_scheduler import StepScheduler
from tests.support.scheduler.steps import decodes, said
from tests.support.stall import stand_still
from tests.support.worker_loop import HELLO, RunningWorker
from worker.errors import PermanentError
from worker.process.loop import EXIT_FAILED, EXIT_PERMANENT, WorkerLoop
from worker.step.runner import DoneResult, StepRunner

PROMPT = [5, 6, 7]
NEW_ROW = step_pb2.NewRow(
    sequence=1,
    token_ids=PROMPT,
    num_prompt_tokens=3,
    block_ids=[1, 2],
    sampling=inference_pb2.SamplingParams(temperature=1.0, seed=5),
)
PREFILL = step_pb2.StepPlan(new_rows=[NEW_ROW], rows=[0], num_tokens=[3])
DECODE = step_pb2.StepPlan(decode_rows=decodes(0))


def build_fake(progress: Callable[[float], None]) -> StepRunner:
    progress(0.5)
    progress(1.0)
    return fake_runner()


Start = Callable[..., RunningWorker]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    running: list[RunningWorker] = []

    def start(build=build_fake, timeout: float = 30.0) -> RunningWorker:
        running.append(RunningWorker(f"ipc://{tmp_path}/step.sock", build, timeout=timeout))
        return running[-1]

    yield start
    for worker in running:
        worker.stop()


def test_hello_reset_ready_plans_shutdown(start: Start):
    worker = start()
    with StepScheduler(worker.endpoint) as scheduler:
        identity, hello = scheduler.expect_hello()
        assert identity.startswith(b"join-")
        assert hello == HELLO
        ready = scheduler.reset(7, identity)
        assert (ready.epoch, ready.rank, ready.model.name) == (7, 0, "fake")
        results = [scheduler.step(PREFILL), scheduler.step(DECODE), scheduler.step(DECODE)]
        direct = fake_runner()
        expected = [said(direct.execute(plan)).token_ids[0] for plan in (PREFILL, DECODE, DECODE)]
        assert [said(result).token_ids[0] for result in results] == expected
        assert [(result.epoch, result.step) for result in results] == [(7, 1), (7, 2), (7, 3)]
        scheduler.send(step_pb2.SchedulerToWorker(probe=step_pb2.Probe()))
        scheduler.send(step_pb2.SchedulerToWorker(shutdown=step_pb2.Shutdown()))
        assert worker.exit_code() == 0
    assert worker.metrics.registry.get_sample_value("octavo_worker_tokens_total") == 5
    assert worker.metrics.registry.get_sample_value("octavo_worker_rows") == 1


def test_an_order_that_came_before_the_connection_ended_counts(start: Start, monkeypatch: pytest.MonkeyPatch):
    """A scheduler that ends tells its workers to stop, and closes its socket: both may be seen at once."""
    may_look, looks, wait = threading.Event(), threading.Event(), WorkerLoop._wait

    def late(loop: WorkerLoop) -> None:
        looks.set()
        assert may_look.wait(20)
        wait(loop)

    worker = start()
    with StepScheduler(worker.endpoint) as scheduler:
        scheduler.join()
        monkeypatch.setattr(WorkerLoop, "_wait", late)
        worker.wakeup.notify()
        assert looks.wait(20)
        scheduler.send(step_pb2.SchedulerToWorker(shutdown=step_pb2.Shutdown()))
        # Time for ZeroMQ's threads: to deliver, and then to see the end of the connection.
        time.sleep(0.3)
    time.sleep(0.3)
    may_look.set()
    assert worker.exit_code() == 0


def test_plans_sent_ahead_are_computed_in_order(start: Start):
    # Steps overlap: a row's next token comes from its own buffer, and plans that come after the epoch are dropped.
    worker = start()
    with StepScheduler(worker.endpoint) as scheduler:
        scheduler.join()
        for plan in (PREFILL, DECODE, DECODE, DECODE):
            scheduler.send_plan(plan)
        assert [said(scheduler.expect("result")).positions for _ in range(4)] == [[0], [1], [2], [3]]


def test_a_new_epoch_forgets_rows_and_drops_plans_of_the_old_one(start: Start):
    worker = start()
    with StepScheduler(worker.endpoint) as scheduler:
        scheduler.join(epoch=1)
        first = scheduler.step(PREFILL)
        scheduler.reset(2)
        scheduler.send_plan(DECODE, epoch=1)
        scheduler._step, scheduler._digest = 0, b""
        # Row 0 is free again; if the late plan had counted, step 1 would come twice.
        again = scheduler.step(PREFILL)
        assert (again.epoch, again.step) == (2, 1)
        assert again.token_ids == first.token_ids


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": 5}, "step: 5 follows 1; a plan is missing"),
        ({"previous_digest": b"x" * 16}, "previous_digest: 7878"),
        ({"previous_digest": b""}, "previous_digest: empty"),
    ],
)
def test_a_broken_chain_ends_the_epoch_and_not_the_worker(start: Start, changes: dict, message: str):
    worker = start()
    with StepScheduler(worker.endpoint) as scheduler:
        scheduler.join()
        scheduler.step(PREFILL)
        scheduler.send_plan(DECODE, **changes)
        # The next plan is valid by itself, but must not be computed.
        scheduler.send_plan(DECODE)
        failure = scheduler.expect("failure")
        assert message in failure.message
        assert (failure.epoch, failure.rank, failure.permanent) == (1, 0, False)
        scheduler.reset(2)
        assert scheduler.step(PREFILL).step == 1


@pytest.mark.parametrize(
    "frames",
    [
        [b"\xff\xff\xff no protobuf"],
        [b""],
        [step_pb2.SchedulerToWorker(plan=step_pb2.StepPlan(epoch=1, step=1)).SerializeToString(), b"second frame"],
        # Row 9 does not exist.
        [b"\x12\x0a\x08\x01\x10\x01\x4a\x01\x09\x52\x01\x01"],
    ],
)
def test_malformed_messages_end_the_epoch_and_not_the_worker(start: Start, frames: list[bytes]):
    worker = start()
    with StepScheduler(worker.endpoint) as scheduler:
        scheduler.join()
        scheduler.send(frames[0], rank_identity(1, 0), *frames[1:])
        failure = scheduler.expect("failure")
        assert failure.message
        assert not failure.permanent
        scheduler.reset(2)
        assert scheduler.step(PREFILL).token_ids
    assert worker.metrics.registry.get_sample_value("octavo_worker_epoch_failures_total") == 1


def test_a_restarted_scheduler_hears_hello_again_and_weights_stay(start: Start):
    builds = []

    def build(progress: Callable[[float], None]) -> StepRunner:
        builds.append(1)
        return fake_runner()

    worker = start(build)
    with StepScheduler(worker.endpoint, instance=1) as scheduler:
        scheduler.join()
        first = scheduler.step(PREFILL)
        scheduler.heartbeats.wait_for(lambda beat: beat.step == 1)
    with StepScheduler(worker.endpoint, instance=2) as scheduler:
        # Epochs grow over restarts: the worker's old connection may still hold its identity of epoch 1.
        scheduler.join(epoch=2)
        assert scheduler.step(PREFILL).token_ids == first.token_ids
    assert builds == [1]


def test_a_scheduler_that_ends_before_it_has_answered_a_heartbeat_costs_no_weights(start: Start):
    # Only its Reset tells the worker which scheduler it was.
    loads: list[int] = []

    def build(progress: Callable[[float], None]) -> StepRunner:
        loads.append(1)
        return fake_runner()

    worker = start(build)
    with StepScheduler(worker.endpoint, instance=1) as scheduler:
        scheduler.heartbeats.set_silent(True)
        # Waits for Ready: if this socket closed before, a Ready in flight would reach the next scheduler.
        scheduler.join(epoch=1)
    with StepScheduler(worker.endpoint, instance=2) as scheduler:
        scheduler.join(epoch=2)
        assert scheduler.step(PREFILL).token_ids
    assert loads == [1]


class Exploding:
    """A runner whose steps raise while `left` is above 0."""

    holds_constrained = False
    drafter = ""
    items = None

    def __init__(self, left: int) -> None:
        self._runner, self.left = fake_runner(), left
        self.model_info, self.num_swap_blocks = self._runner.model_info, 0

    @property
    def num_live_rows(self) -> int:
        return self._runner.num_live_rows

    def reset(self) -> None:
        self._runner.reset()

    def begin(self, plan: step_pb2.StepPlan) -> DoneResult:
        pending = self._runner.begin(plan)
        if self.left:
            self.left -= 1
            raise RuntimeError("shape mismatch")
        return pending


def test_a_step_that_cannot_be_computed_ends_the_epoch_and_not_the_worker(start: Start):
    runner = Exploding(left=1)
    worker = start(lambda progress: runner)
    with StepScheduler(worker.endpoint) as scheduler:
        scheduler.join()
        scheduler.send_plan(PREFILL)
        # Queued behind it in the socket; its rows are void.
        scheduler.send_plan(DECODE)
        failure = scheduler.expect("failure")
        assert failure.message == "step 1 failed: RuntimeError: shape mismatch"
        assert not failure.permanent
        scheduler.reset(2)
        assert scheduler.step(PREFILL).token_ids


def test_a_worker_that_computes_nothing_any_more_ends(start: Start):
    # A new process may work again, for example after the loss of a device.
    worker = start(lambda progress: Exploding(left=100))
    with StepScheduler(worker.endpoint) as scheduler:
        scheduler.join()
        for epoch in range(2, 9):
            scheduler.send_plan(PREFILL)
            scheduler.expect("failure")
            scheduler.reset(epoch)
        scheduler.send_plan(PREFILL)
        assert scheduler.expect("failure").message == "RuntimeError: shape mismatch"
        assert worker.exit_code() == EXIT_FAILED


def test_a_scheduler_that_was_silent_too_long_hears_hello_again(start: Start):
    worker = start(timeout=1.5)
    with StepScheduler(worker.endpoint) as scheduler:
        scheduler.join()
        scheduler.heartbeats.wait_for(lambda beat: beat.state == step_pb2.WORKER_STATE_IDLE)
        scheduler.heartbeats.set_silent(True)
        count = len(scheduler.heartbeats.received)
        scheduler.heartbeats.wait_for(lambda _: len(scheduler.heartbeats.received) > count + 2)
        scheduler.heartbeats.set_silent(False)
        scheduler.join(epoch=2)


def test_a_stall_of_the_worker_itself_is_not_the_schedulers_silence(start: Start):
    # More than two heartbeats: one that is due, and one in which the stall begins.
    worker = start(timeout=2.5)
    with StepScheduler(worker.endpoint) as scheduler:
        scheduler.join()
        scheduler.heartbeats.wait_for(lambda beat: beat.state == step_pb2.WORKER_STATE_IDLE)
        for _ in range(2):
            stand_still(4.0)
            count = len(scheduler.heartbeats.received)
            scheduler.heartbeats.wait_for(lambda _, count=count: len(scheduler.heartbeats.received) > count + 1)
        # It is still in its epoch: it says no Hello, and the next message is a result.
        assert scheduler.step(PREFILL).token_ids


def test_hello_is_said_again_until_it_is_heard(start: Start):
    # A scheduler may take the Hello and then end: the worker notices only that no Reset comes.
    worker = start()
    with StepScheduler(worker.endpoint) as scheduler:
        first, _ = scheduler.expect_hello()
        second, hello = scheduler.expect_hello()
        assert first != second
        assert hello.instance == 42
        scheduler.reset(1, second)


def test_heartbeats_flow_while_weights_load(start: Start):
    loaded = threading.Event()

    def build(progress: Callable[[float], None]) -> StepRunner:
        progress(0.25)
        assert loaded.wait(60)
        return fake_runner()

    worker = start(build)
    with StepScheduler(worker.endpoint) as scheduler:
        identity, _ = scheduler.expect_hello()
        scheduler.send_reset(4, identity)
        beat = scheduler.heartbeats.wait_for(lambda beat: beat.progress == 0.25)
        assert (beat.state, beat.epoch, beat.instance) == (step_pb2.WORKER_STATE_LOADING, 4, 42)
        loaded.set()
        assert scheduler.expect("ready").epoch == 4
        scheduler.heartbeats.wait_for(lambda beat: beat.state == step_pb2.WORKER_STATE_IDLE)


def test_a_stop_is_heard_while_weights_load(start: Start):
    begun, stopped = threading.Event(), threading.Event()

    def build(progress: Callable[[float], None]) -> StepRunner:
        begun.set()
        assert stopped.wait(60)
        progress(0.5)
        raise AssertionError("loading went on")

    worker = start(build)
    with StepScheduler(worker.endpoint) as scheduler:
        identity, _ = scheduler.expect_hello()
        scheduler.send_reset(1, identity)
        assert begun.wait(60)
        worker.wakeup.request_stop()
        stopped.set()
        assert worker.exit_code() == 0


def test_a_stop_ends_the_wait_for_a_scheduler(start: Start):
    worker = start()
    worker.wakeup.request_stop()
    assert worker.exit_code() == 0


@pytest.mark.parametrize(
    ("error", "code", "permanent"),
    [
        (ValueError("model.gguf: damaged"), EXIT_PERMANENT, True),
        (PermanentError("max_model_len=9 does not fit"), EXIT_PERMANENT, True),
        (OSError("disk on fire"), EXIT_FAILED, False),
    ],
)
def test_a_model_that_does_not_load_is_told_before_exit(start: Start, error: Exception, code: int, permanent: bool):
    def build(progress: Callable[[float], None]) -> StepRunner:
        raise error

    worker = start(build)
    with StepScheduler(worker.endpoint) as scheduler:
        identity, _ = scheduler.expect_hello()
        scheduler.send_reset(1, identity)
        failure = scheduler.expect("failure")
        assert str(error) in failure.message
        assert failure.permanent == permanent
        assert worker.exit_code() == code


@pytest.mark.parametrize(("permanent", "code"), [(True, EXIT_PERMANENT), (False, EXIT_FAILED)])
def test_a_refused_worker_says_why(start: Start, permanent: bool, code: int, caplog: pytest.LogCaptureFixture):
    worker = start()
    with StepScheduler(worker.endpoint) as scheduler:
        identity, _ = scheduler.expect_hello()
        shutdown = step_pb2.Shutdown(reason="block_size=8, not 16", permanent=permanent)
        scheduler.send(step_pb2.SchedulerToWorker(shutdown=shutdown), identity)
        assert worker.exit_code() == code
    assert "block_size=8, not 16" in caplog.text
