"""The life of a worker: Hello, Reset, Ready, then plan after plan (protos/step.proto has the protocol)."""

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import zmq
from google.protobuf.message import DecodeError

from protos import step_pb2
from runtime.wire import plan_digest
from worker.errors import CollectiveError, PermanentError, PlanError, StepError
from worker.process.link import Link, Wakeup
from worker.process.status import HeartbeatThread, WorkerMetrics, WorkerStatus
from worker.step.runner import PendingResult, StepRunner

if TYPE_CHECKING:
    from worker.parallel.groups import Groups


class PlanChain:
    """Step numbers and digests of one epoch. A rank that missed a plan finds out here, before it would hang in a
    collective."""

    def __init__(self) -> None:
        self._step = 0
        self._digest = b""

    def follow(self, plan: step_pb2.StepPlan, payload: bytes) -> None:
        """payload: the bytes that carried the plan. Raises PlanError if a plan before it is missing or was another."""
        if plan.step != self._step + 1:
            raise PlanError(f"step: {plan.step} follows {self._step}; a plan is missing, or came twice")
        if plan.previous_digest != self._digest:
            raise PlanError(
                f"previous_digest: {plan.previous_digest.hex() or 'empty'} in step {plan.step}, but the plan before it "
                f"has {self._digest.hex() or 'none'}"
            )
        self._step, self._digest = plan.step, plan_digest(payload)


_log = logging.getLogger("octavo.worker")

EXIT_FAILED = 1
# Starting again would fail in the same way; `octavo up` gives up on it.
EXIT_PERMANENT = 2

# Steps that failed without one that succeeded in between; then a new process may do better.
_MOST_FAILED_STEPS = 8

_PROBE = step_pb2.SchedulerToWorker(probe=step_pb2.Probe()).SerializeToString()

_FIRST_HELLO_AGAIN, _LAST_HELLO_AGAIN = 1.0, 32.0


class _StopRequested(Exception):
    """Leaves loading early."""


class _Overtaken(Exception):
    """Leaves a rendezvous for what the scheduler says next."""


@dataclass(frozen=True, slots=True)
class _Step:
    """One that was begun and whose result has not been sent."""

    plan: step_pb2.StepPlan
    pending: PendingResult
    # Of the plan (time.perf_counter).
    arrival: float


class WorkerLoop:
    """Runs on one thread, which owns the link's socket.

    It begins each plan as soon as it is there and sends each result as soon as it is there. While steps are computed
    elsewhere it sleeps, until a message comes or a step is done.
    """

    def __init__(
        self,
        *,
        hello: step_pb2.Hello,
        link: Link,
        heartbeat: HeartbeatThread,
        status: WorkerStatus,
        wakeup: Wakeup,
        metrics: WorkerMetrics,
        build: Callable[[Callable[[float], None]], StepRunner],
        connect: "Callable[[str, Callable[[], None]], Groups] | None" = None,
        returns_results: bool = True,
        max_steps_in_flight: int = 1,
    ) -> None:
        """build: makes the runner, given what to report progress to; worker.process.build has its errors.
        connect: of a replica of several ranks: connects with the others at a rendezvous, given what to call while it
        waits; see worker.parallel.group_init. returns_results: one rank does."""
        self._hello, self._rank = hello, hello.rank
        self._link, self._heartbeat, self._status = link, heartbeat, status
        self._wakeup, self._metrics, self._build = wakeup, metrics, build
        self._connect, self._returns_results = connect, returns_results
        self._max_steps_in_flight = max_steps_in_flight
        self._runner: StepRunner | None = None
        self._chain = PlanChain()
        # Of this epoch, in the order of their plans.
        self._in_flight: deque[_Step] = deque()
        self._epoch = 0
        # Plans are computed. False before the first Reset, and from a failure to the next Reset.
        self._is_ready = False
        self._num_failed_steps = 0
        self._exit_code: int | None = None
        # While joining, when to say Hello again, and after what pause; None: not joining.
        self._hello_due: float | None = None
        self._hello_pause = _FIRST_HELLO_AGAIN
        self._num_losses_seen = 0
        # Received while something else was under way: the next message to be handled.
        self._put_back: list[bytes] | None = None

    def run(self) -> int:
        """Serves until told to stop. Returns the exit code of the process."""
        try:
            self._join()
            while self._exit_code is None and not self._wakeup.stop_requested:
                self._wait()
                self._rejoin_if_due()
                self._serve()
            self._drop_in_flight()
        except _StopRequested:
            pass
        except PermanentError as error:
            return self._give_up(str(error), permanent=True)
        except Exception as error:  # noqa: BLE001 - whatever it is, the scheduler must hear of it
            _log.exception("the worker failed")
            return self._give_up(f"{type(error).__name__}: {error}", permanent=False)
        finally:
            # Not left to the end of the process: NCCL would wait for graphs that are still there.
            if self._connect is not None and self._runner is not None:
                self._runner.join(None)
        return self._exit_code or 0

    # --- Joining

    def _join(self) -> None:
        self._num_losses_seen = self._heartbeat.num_losses
        self._is_ready = False
        self._drop_in_flight()
        self._link.join()
        self._link.send(step_pb2.WorkerToScheduler(hello=self._hello))
        self._hello_due = time.monotonic() + self._hello_pause

    def _rejoin_if_due(self) -> None:
        if self._heartbeat.num_losses != self._num_losses_seen:
            self._hello_pause = _FIRST_HELLO_AGAIN
            self._join()
        elif self._hello_due is not None and time.monotonic() >= self._hello_due:
            # A scheduler that ended between this Hello and its Reset has taken the Hello with it.
            self._hello_pause = min(2 * self._hello_pause, _LAST_HELLO_AGAIN)
            self._join()

    def _wait(self) -> None:
        poller = zmq.Poller()
        poller.register(self._link.socket, zmq.POLLIN)
        poller.register(self._wakeup.reader, zmq.POLLIN)
        due = self._hello_due
        poller.poll(None if due is None else max(0, math.ceil((due - time.monotonic()) * 1000)))
        self._wakeup.drain()

    # --- Messages

    def _serve(self) -> None:
        """Handles what has arrived, and sends the results that are there."""
        while self._exit_code is None and not self._wakeup.stop_requested:
            try:
                frames, self._put_back = self._put_back or self._link.receive(), None
                if frames is not None:
                    self._handle(frames)
                self._send_results()
            except (PlanError, StepError) as error:
                self._fail_epoch(error)
            else:
                if frames is None:
                    return

    def _handle(self, frames: list[bytes]) -> None:
        arrival = time.perf_counter()
        if len(frames) != 1:
            raise PlanError(f"a message of {len(frames)} frames; one frame holds one SchedulerToWorker")
        try:
            message = step_pb2.SchedulerToWorker.FromString(frames[0])
        except DecodeError:
            raise PlanError(f"a message of {len(frames[0])} bytes is no SchedulerToWorker") from None
        match message.WhichOneof("message"):
            case "plan":
                self._begin(message.plan, frames[0], arrival)
            case "reset":
                with suppress(_Overtaken):
                    self._reset(message.reset)
            case "shutdown":
                self._shut_down(message.shutdown)
            case "probe":
                pass
            case _:
                raise PlanError("a SchedulerToWorker holds no message of a kind known here")

    def _reset(self, reset: step_pb2.Reset) -> None:
        self._hello_due, self._hello_pause = None, _FIRST_HELLO_AGAIN
        self._is_ready = False
        self._drop_in_flight()
        self._epoch = reset.epoch
        self._heartbeat.follow(reset.scheduler)
        self._link.enter(reset.epoch, self._rank)
        if bool(reset.rendezvous) != (self._connect is not None):
            raise PermanentError(
                f"rendezvous: {reset.rendezvous!r}, but world_size is {self._hello.world_size} here: give all "
                f"processes the same options"
            )
        if self._runner is None:
            self._status.set(step_pb2.WORKER_STATE_LOADING, epoch=reset.epoch, step=0, progress=0.0)
            try:
                self._runner = self._build(self._show_progress)
            except ValueError as error:
                raise PermanentError(str(error)) from error
        else:
            if self._connect is not None:
                self._runner.join(None)
            self._runner.reset()
        if self._connect is not None:
            self._status.set(step_pb2.WORKER_STATE_LOADING, epoch=reset.epoch, step=0)
            self._runner.join(self._connect(reset.rendezvous, self._look_up), self._look_up)
        self._chain = PlanChain()
        self._is_ready = True
        self._status.set(step_pb2.WORKER_STATE_IDLE, epoch=reset.epoch, step=0, progress=1.0)
        ready = step_pb2.Ready(
            epoch=reset.epoch,
            rank=self._rank,
            model=self._runner.model_info,
            num_swap_blocks=self._runner.num_swap_blocks,
        )
        self._link.send(step_pb2.WorkerToScheduler(ready=ready))
        _log.info("ready for epoch %d", reset.epoch)

    def _show_progress(self, fraction: float) -> None:
        """Called while loading; also the place where loading can be left."""
        if self._wakeup.stop_requested:
            raise _StopRequested
        loading = fraction < 1.0
        state = step_pb2.WORKER_STATE_LOADING if loading else step_pb2.WORKER_STATE_COMPILING
        self._status.set(state, progress=fraction)

    def _look_up(self) -> None:
        """Called while the other ranks are waited for. They may never come to this rendezvous: if one has died, a new
        Reset names another; if the scheduler has, too, it comes after a new Hello."""
        if self._wakeup.stop_requested:
            raise _StopRequested
        if self._heartbeat.num_losses != self._num_losses_seen:
            raise _Overtaken
        # Whoever has entered an epoch is probed again and again.
        while (frames := self._link.receive()) is not None:
            if frames != [_PROBE]:
                self._put_back = frames
                raise _Overtaken

    def _shut_down(self, shutdown: step_pb2.Shutdown) -> None:
        if not shutdown.reason:
            _log.info("the scheduler ends this worker")
            self._exit_code = 0
            return
        _log.error("the scheduler refuses this worker: %s", shutdown.reason)
        self._exit_code = EXIT_PERMANENT if shutdown.permanent else EXIT_FAILED

    # --- Steps

    def _begin(self, plan: step_pb2.StepPlan, payload: bytes, arrival: float) -> None:
        if plan.epoch != self._epoch or not self._is_ready:
            _log.debug("step %d of epoch %d is dropped; epoch %d is in force", plan.step, plan.epoch, self._epoch)
            return
        assert self._runner is not None
        self._chain.follow(plan, payload)
        if not self._returns_results:
            # The rank that does may be ahead of this one: its result has brought this plan.
            self._send_results(most_left=self._max_steps_in_flight - 1)
        self._status.begin_step(plan.step)
        try:
            pending = self._runner.begin(plan)
            if not pending.is_done:
                pending.call_when_done(self._wakeup.notify)
        except Exception as error:  # noqa: BLE001 - whatever it is, the scheduler must hear of it
            self._fail_step(plan, error)
        self._in_flight.append(_Step(plan, pending, arrival))

    def _send_results(self, *, most_left: int | None = None) -> None:
        """Of the steps that are done, in order. most_left: waits until no more than so many are in flight. After a
        failure there are none."""
        try:
            while self._in_flight:
                step = self._in_flight[0]
                try:
                    is_wanted = most_left is not None and len(self._in_flight) > most_left
                    if not (is_wanted or step.pending.is_done):
                        return
                    result = step.pending.result()
                except Exception as error:  # noqa: BLE001 - as above
                    self._fail_step(step.plan, error)
                self._send_result(step, result)
        except Exception:
            # What was begun after this one builds on it.
            self._drop_in_flight()
            raise

    def _send_result(self, step: _Step, result: step_pb2.StepResult) -> None:
        assert self._runner is not None
        result.timing.total = time.perf_counter() - step.arrival
        if self._returns_results and not self._link.send(step_pb2.WorkerToScheduler(result=result)):
            raise PlanError(f"step: the result of {step.plan.step} can't be sent, for nobody takes results")
        self._in_flight.popleft()
        self._num_failed_steps = 0
        self._status.end_step()
        self._metrics.count_step(step.plan, result, self._runner.num_live_rows)

    def _fail_step(self, plan: step_pb2.StepPlan, error: Exception) -> NoReturn:
        """Whatever the model raises ends the epoch. The process stays, its weights loaded, as long as that may help."""
        if isinstance(error, PlanError):
            raise error
        if isinstance(error, CollectiveError):
            # No new process in place of this one would do better.
            raise CollectiveError(f"step {plan.step} failed: {error}") from error
        self._num_failed_steps += 1
        if self._num_failed_steps >= _MOST_FAILED_STEPS:
            raise error
        _log.error("step %d failed", plan.step, exc_info=error)
        cause = str(error) if isinstance(error, StepError) else f"{type(error).__name__}: {error}"
        raise StepError(f"step {plan.step} failed: {cause}") from error

    def _drop_in_flight(self) -> None:
        """Nobody wants their results any more. They count as steps of this worker until it has waited for them."""
        if self._in_flight:
            assert self._runner is not None
            _log.debug("the results of steps %d to %d are dropped", *(self._in_flight[i].plan.step for i in (0, -1)))
            if self._connect is not None:
                # They may wait for other ranks, and these for them.
                self._runner.join(None)
            self._runner.reset()
            self._in_flight.clear()
            self._status.set(step_pb2.WORKER_STATE_IDLE)

    # --- Failures

    def _fail_epoch(self, error: PlanError | StepError) -> None:
        """What follows can't be computed: says so and waits for a Reset. The results of steps before it go first."""
        try:
            self._send_results(most_left=0)
        except (PlanError, StepError) as earlier:
            error = earlier
        self._status.set(step_pb2.WORKER_STATE_IDLE)
        _log.error("epoch %d is over: %s", self._epoch, error)
        self._is_ready = False
        if self._connect is not None and self._runner is not None:
            # The other ranks may wait for this one within the step.
            self._runner.join(None)
        self._metrics.count_epoch_failure()
        self._send_failure(str(error), is_consequence=isinstance(error, CollectiveError))

    def _give_up(self, message: str, *, permanent: bool) -> int:
        if permanent:
            _log.error("%s", message)
        self._is_ready = False
        self._send_failure(message, permanent=permanent)
        return EXIT_PERMANENT if permanent else EXIT_FAILED

    def _send_failure(self, message: str, *, permanent: bool = False, is_consequence: bool = False) -> None:
        failure = step_pb2.Failure(
            epoch=self._epoch,
            rank=self._rank,
            message=message,
            permanent=permanent,
            is_consequence=is_consequence,
        )
        if not self._link.send(step_pb2.WorkerToScheduler(failure=failure)):
            _log.warning("nobody takes this worker's failure")
