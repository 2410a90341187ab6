"""The main loop of a worker: Hello, Reset, Ready, then plan after plan (see protos/step.proto for the protocol)."""

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
from worker.process.status import HeartbeatThread, WorkerMetrics, WorkerStatus, make_ready
from worker.step.runner import PendingResult, StepRunner

if TYPE_CHECKING:
    from worker.parallel.groups import Groups

_log = logging.getLogger("octavo.worker")

EXIT_FAILED = 1
# A restart would fail in the same way: `octavo up` does not try.
EXIT_PERMANENT = 2

# Failed steps in a row after which the process ends, since a new one may do better.
_MOST_FAILED_STEPS = 8

_PROBE = step_pb2.SchedulerToWorker(probe=step_pb2.Probe()).SerializeToString()

# The loop shows at least this often that it goes on.
_LONGEST_WAIT_S = 1.0
_FIRST_HELLO_AGAIN, _LAST_HELLO_AGAIN = 1.0, 32.0


class _StopRequested(Exception):
    """Interrupts loading or a rendezvous to stop the worker."""


class _Overtaken(Exception):
    """Interrupts a rendezvous that a newer message, or the loss of the scheduler, has made obsolete."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A step that was begun and whose result has not been sent."""

    plan: step_pb2.StepPlan
    pending: PendingResult
    # When the plan arrived (time.perf_counter).
    arrival: float


class PlanChain:
    """Checks step numbers and digests within an epoch. A rank that missed a plan finds out here, before it would hang
    in a collective."""

    def __init__(self) -> None:
        self._step = 0
        self._digest = b""

    def follow(self, plan: step_pb2.StepPlan, payload: bytes) -> None:
        """Adds a plan. payload: its serialized bytes. Raises PlanError if the plan before it is missing or differs."""
        if plan.step != self._step + 1:
            raise PlanError(f"step: {plan.step} follows {self._step}; a plan is missing, or arrived twice")
        if plan.previous_digest != self._digest:
            raise PlanError(
                f"previous_digest: {plan.previous_digest.hex() or 'empty'} in step {plan.step}, but the plan before it "
                f"has {self._digest.hex() or 'none'}"
            )
        self._step, self._digest = plan.step, plan_digest(payload)


class WorkerLoop:
    """The worker's main loop. It runs on one thread, which owns the link's socket.

    It begins each plan when it arrives, and sends each result when it is ready. While a device or another thread
    computes steps, the loop sleeps until a message comes or a step is done.
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
        """build: makes the runner; gets a function to report progress to; see worker.process.build for its errors.
        connect: connects the ranks of a replica that has several; gets the rendezvous and a function to call while it
        waits; see worker.parallel.group_init. returns_results: True for one rank of the replica."""
        self._hello, self._rank = hello, hello.rank
        self._link, self._heartbeat, self._status = link, heartbeat, status
        self._wakeup, self._metrics, self._build = wakeup, metrics, build
        self._connect, self._returns_results = connect, returns_results
        self._max_steps_in_flight = max_steps_in_flight
        self._runner: StepRunner | None = None
        self._chain = PlanChain()
        # Steps of this epoch, in the order of their plans.
        self._in_flight: deque[_Step] = deque()
        self._epoch = 0
        # Plans are dropped if False: before the first Reset, and from a failure to the next Reset.
        self._is_ready = False
        self._num_failed_steps = 0
        self._exit_code: int | None = None
        # While joining: when to send Hello again, and the length of the pause. None: not joining.
        self._hello_due: float | None = None
        self._hello_pause = _FIRST_HELLO_AGAIN
        self._num_losses_seen = 0
        # The connection to the scheduler has just ended.
        self._is_cut = False
        # A message received while waiting for other ranks: the next one to be handled.
        self._put_back: list[bytes] | None = None

    def run(self) -> int:
        """Runs until the worker is told to stop. Returns the exit code of the process."""
        try:
            self._join()
            while self._exit_code is None and not self._wakeup.stop_requested:
                self._wait()
                self._rejoin_if_due()
                self._serve()
            self._leave_epoch()
        except _StopRequested:
            pass
        except PermanentError as error:
            return self._give_up(str(error), permanent=True)
        except Exception as error:  # noqa: BLE001 - whatever it is, the scheduler must hear of it
            _log.exception("the worker failed")
            return self._give_up(f"{type(error).__name__}: {error}", permanent=False)
        finally:
            # Leaves the groups now: at the end of the process NCCL would wait for graphs that still exist.
            self._leave_groups()
        return self._exit_code or 0

    # --- Joining

    def _join(self) -> None:
        self._num_losses_seen = self._heartbeat.num_losses
        self._is_ready = False
        self._leave_epoch()
        self._link.join()
        self._link.send(step_pb2.WorkerToScheduler(hello=self._hello))
        self._hello_due = time.monotonic() + self._hello_pause

    def _rejoin_if_due(self) -> None:
        if self._is_cut and self._hello_due is None:
            # What arrived before the end of the connection may be the order to stop.
            self._serve()
            if self._exit_code is not None:
                return
            _log.warning("the connection to the scheduler was cut")
            self._heartbeat.forget()
            self._hello_pause = _FIRST_HELLO_AGAIN
            self._join()
        elif self._heartbeat.num_losses != self._num_losses_seen:
            self._hello_pause = _FIRST_HELLO_AGAIN
            self._join()
        elif self._hello_due is not None and time.monotonic() >= self._hello_due:
            # If the scheduler ended between this Hello and its Reset, the Hello is lost.
            self._hello_pause = min(2 * self._hello_pause, _LAST_HELLO_AGAIN)
            self._join()

    def _wait(self) -> None:
        poller = zmq.Poller()
        poller.register(self._link.socket, zmq.POLLIN)
        poller.register(self._link.cuts, zmq.POLLIN)
        poller.register(self._wakeup.reader, zmq.POLLIN)
        wait, due = _LONGEST_WAIT_S, self._hello_due
        if due is not None:
            wait = min(wait, max(0.0, due - time.monotonic()))
        ready = dict(poller.poll(math.ceil(wait * 1000)))
        self._is_cut = self._link.cuts in ready and self._link.was_cut()
        self._wakeup.drain()
        self._status.turn()

    # --- Messages

    def _serve(self) -> None:
        """Handles messages that have arrived, and sends results that are ready."""
        while self._exit_code is None and not self._wakeup.stop_requested:
            try:
                frames, self._put_back = self._put_back or self._link.receive(), None
                if frames is not None:
                    self._handle(frames)
                self._send_results()
                self._send_prepared()
            except (PlanError, StepError) as error:
                self._fail_epoch(error)
            else:
                if frames is None:
                    return

    def _handle(self, frames: list[bytes]) -> None:
        arrival = time.perf_counter()
        if len(frames) != 1:
            raise PlanError(f"a message has {len(frames)} frames; it must have one, with one SchedulerToWorker")
        try:
            message = step_pb2.SchedulerToWorker.FromString(frames[0])
        except DecodeError:
            raise PlanError(f"a message of {len(frames[0])} bytes is not a SchedulerToWorker") from None
        match message.WhichOneof("message"):
            case "plan":
                self._begin(message.plan, frames[0], arrival)
            case "reset":
                with suppress(_Overtaken):
                    self._reset(message.reset)
            case "shutdown":
                self._shut_down(message.shutdown)
            case "item":
                self._prepare(message.item)
            case "leave":
                if message.leave.epoch == self._epoch:
                    self._is_ready = False
                    self._leave_epoch()
            case "probe":
                pass
            case _:
                raise PlanError("a SchedulerToWorker holds no message of a known kind")

    def _reset(self, reset: step_pb2.Reset) -> None:
        self._hello_due, self._hello_pause = None, _FIRST_HELLO_AGAIN
        self._is_ready = False
        self._leave_epoch()
        self._epoch = reset.epoch
        self._heartbeat.follow(reset.scheduler)
        self._link.enter(reset.epoch, self._rank)
        if bool(reset.rendezvous) != (self._connect is not None):
            raise PermanentError(
                f"rendezvous is {reset.rendezvous!r}, but world_size is {self._hello.world_size} here: give all "
                f"processes the same options"
            )
        if self._runner is None:
            self._status.set(step_pb2.WORKER_STATE_LOADING, epoch=reset.epoch, step=0, progress=0.0)
            try:
                self._runner = self._build(self._show_progress)
            except ValueError as error:
                raise PermanentError(str(error)) from error
        else:
            self._runner.reset()
        if self._connect is not None:
            self._status.set(step_pb2.WORKER_STATE_LOADING, epoch=reset.epoch, step=0)
            self._runner.join(self._connect(reset.rendezvous, self._look_up), self._look_up)
        self._chain = PlanChain()
        self._is_ready = True
        self._status.set(step_pb2.WORKER_STATE_IDLE, epoch=reset.epoch, step=0, progress=1.0)
        ready = make_ready(self._runner, epoch=reset.epoch, rank=self._rank)
        self._link.send(step_pb2.WorkerToScheduler(ready=ready))
        _log.info("ready for epoch %d", reset.epoch)

    def _show_progress(self, fraction: float) -> None:
        """Reports the progress of loading, which calls it repeatedly. Raises _StopRequested to end loading early."""
        if self._wakeup.stop_requested:
            raise _StopRequested
        loading = fraction < 1.0
        state = step_pb2.WORKER_STATE_LOADING if loading else step_pb2.WORKER_STATE_COMPILING
        self._status.set(state, progress=fraction)

    def _look_up(self) -> None:
        """Checks for news while this rank waits for others, which may never come to this rendezvous. If a rank has
        died, a new Reset names another rendezvous; if the scheduler has died, too, that Reset follows a new Hello."""
        if self._wakeup.stop_requested:
            raise _StopRequested
        if self._heartbeat.num_losses != self._num_losses_seen:
            raise _Overtaken
        # The scheduler probes ranks that have entered an epoch repeatedly; probes need no answer.
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
            # The rank that returns results may be ahead, and its result has led to this plan. Wait until this rank has
            # room for one more step, too.
            self._send_results(most_left=self._max_steps_in_flight - 1)
        self._status.begin_step(plan.step)
        try:
            pending = self._runner.begin(plan)
            if not pending.is_done:
                pending.call_when_done(self._wakeup.notify)
        except Exception as error:  # noqa: BLE001 - whatever it is, the scheduler must hear of it
            self._fail_step(plan, error)
        self._in_flight.append(_Step(plan, pending, arrival))

    def _prepare(self, message: step_pb2.ItemToEncode) -> None:
        if message.epoch != self._epoch or not self._is_ready:
            _log.debug("item %d is dropped: it is of epoch %d, not %d", message.number, message.epoch, self._epoch)
            return
        assert self._runner is not None
        if self._runner.items is None:
            raise PlanError(f"item: {message.number} comes to a rank that encodes no items")
        self._runner.items.prepare(message, self._wakeup.notify)

    def _send_prepared(self) -> None:
        if not self._is_ready or self._runner is None or self._runner.items is None:
            return
        for number, error in self._runner.items.take_done():
            prepared = step_pb2.ItemPrepared(epoch=self._epoch, rank=self._rank, number=number, error=error)
            if not self._link.send(step_pb2.WorkerToScheduler(item=prepared)):
                raise PlanError(f"item: that {number} is prepared can't be sent: the scheduler receives nothing")

    def _send_results(self, *, most_left: int | None = None) -> None:
        """Sends the results of steps that are done, in order. most_left: waits until at most this many steps are in
        flight. After a failure none are."""
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
            # Later steps build on the failed one.
            self._leave_epoch()
            raise

    def _send_result(self, step: _Step, result: step_pb2.StepResult) -> None:
        assert self._runner is not None
        result.timing.total = time.perf_counter() - step.arrival
        if self._returns_results and not self._link.send(step_pb2.WorkerToScheduler(result=result)):
            raise PlanError(f"step: the result of {step.plan.step} can't be sent: the scheduler receives nothing")
        self._in_flight.popleft()
        self._num_failed_steps = 0
        self._status.end_step()
        self._metrics.count_step(step.plan, result, self._runner)

    def _fail_step(self, plan: step_pb2.StepPlan, error: Exception) -> NoReturn:
        """Turns any error of a step into one that ends the epoch. The process keeps running with its weights loaded,
        unless too many steps in a row have failed."""
        if isinstance(error, PlanError):
            raise error
        if isinstance(error, CollectiveError):
            # Not counted as this rank's failure: a new process would not do better.
            raise CollectiveError(f"step {plan.step} failed: {error}") from error
        self._num_failed_steps += 1
        if self._num_failed_steps >= _MOST_FAILED_STEPS:
            raise error
        _log.error("step %d failed", plan.step, exc_info=error)
        cause = str(error) if isinstance(error, StepError) else f"{type(error).__name__}: {error}"
        raise StepError(f"step {plan.step} failed: {cause}") from error

    def _leave_epoch(self) -> None:
        """Leaves the groups, and drops the results of steps in flight, which stay in the status until they end."""
        self._leave_groups()
        if self._in_flight:
            assert self._runner is not None
            _log.debug("the results of steps %d to %d are dropped", *(self._in_flight[i].plan.step for i in (0, -1)))
            self._runner.reset()
            self._in_flight.clear()
            self._status.set(step_pb2.WORKER_STATE_IDLE)

    def _leave_groups(self) -> None:
        """Makes steps fail that wait for this rank, here and at other ranks."""
        if self._connect is not None and self._runner is not None:
            self._runner.join(None)

    # --- Failures

    def _fail_epoch(self, error: PlanError | StepError) -> None:
        """Ends the epoch: sends the results of earlier steps, then a Failure. The next Reset starts a new epoch."""
        try:
            self._send_results(most_left=0)
        except (PlanError, StepError) as earlier:
            error = earlier
        self._status.set(step_pb2.WORKER_STATE_IDLE)
        _log.error("epoch %d is over: %s", self._epoch, error)
        self._is_ready = False
        self._leave_groups()
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
            _log.warning("the worker's failure can't be sent: the scheduler receives nothing")
