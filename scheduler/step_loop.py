"""The thread that owns the core and ZeroMQ: takes results and commands in, sends plans and outputs out.

What matters is the time from a step's result to the next step's plan, for the workers may idle meanwhile. So a result
is applied, the next plans are made and sent, and only then the outputs are put into messages for the routers. Cancels
and deadlines come before results, so that no output speaks of a sequence that has ended otherwise.
"""

import dataclasses
import gc
import logging
import math
import secrets
import threading
import time
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import zmq

from configs.options import Options
from protos import scheduler_pb2, step_pb2
from runtime.security.curve import start_authenticator
from runtime.telemetry.tracing import Tracing
from runtime.wire import PROTOCOL_VERSION, heartbeat_endpoint
from scheduler.core.core import Core
from scheduler.core.messages import CoreStats, Plan, StepOutputs
from scheduler.lockstep.lockstep import Lockstep, WaveError
from scheduler.ranks.epochs import EpochBegun, EpochEnded, Event, Fatal, StepReturned, rendezvous_of
from scheduler.ranks.heartbeats import Heartbeats
from scheduler.ranks.membership import Terms
from scheduler.ranks.step_wire import ResultError, StepClock, StepCodec
from scheduler.ranks.workers import Workers
from scheduler.recording.file import RecordingWriter, recording_path
from scheduler.recording.recorded_core import RecordedCore
from scheduler.sessions import commands
from scheduler.sessions.commands import StepLoopListener
from scheduler.sessions.requests import Requests
from scheduler.settings import core_settings
from scheduler.sockets import InvalidMessages
from scheduler.telemetry.metrics import SchedulerMetrics, SchedulerStatus
from scheduler.telemetry.reports import StatsLog, StepReports, warn_of_preemptions

log = logging.getLogger("octavo.scheduler")

Answer = TypeVar("Answer")

_TICK_S = 1.0


class StepLoop(threading.Thread):
    """Runs from `start_bound` until Drain or Stop, or until nothing can help."""

    def __init__(
        self,
        options: Options,
        replica: int,
        mailbox: commands.Mailbox,
        front: StepLoopListener,
        tracing: Tracing | None = None,
    ) -> None:
        """tracing: None if requests are not traced."""
        super().__init__(name="step-loop", daemon=True)
        self._options, self._replica = options, replica
        self._mailbox, self._front = mailbox, front
        self._bound: Future[None] = Future()
        # Replaced whole, so that any thread may read it.
        self.status = SchedulerStatus(stats=CoreStats())
        self.metrics = SchedulerMetrics(lambda: self.status, options, replica)
        self._telemetry = StepReports(self.metrics, tracing, replica)
        self._stats_log = StatsLog(enabled=not options.disable_log_stats, now=time.monotonic())
        self._requests = Requests()
        self._codec = StepCodec(0)
        self._clock = StepClock()
        # None: no trace is wanted.
        self._trace: RecordingWriter | None = None
        # Of the results that came in this round; told after the next plans have been sent.
        self._outputs: list[StepOutputs] = []
        self._num_swap_blocks = self._num_lost_with_workers = 0
        self._next_tick = 0.0
        self._drain_deadline: float | None = None
        self._is_over = False
        self._cause: str | None = None
        # With replicas that compute their steps together; None: with none.
        self._lockstep: Lockstep | None = None
        # Once it is over: it would fail in the same way again.
        self.failed_for_good = False

    def start_bound(self) -> None:
        """Starts the thread; returns once the sockets are bound. Raises AddressError, CurveError or TraceError."""
        self.start()
        self._bound.result()

    @property
    def core(self) -> Core | None:
        """For whoever has joined the thread; None if no epoch ever began."""
        return self._requests.core

    def run(self) -> None:
        try:
            with ExitStack() as stack:
                try:
                    self._open(stack)
                except (OSError, ValueError, zmq.ZMQError) as error:
                    self._bound.set_exception(error)
                    return
                self._bound.set_result(None)
                self._loop()
        except Exception as error:
            log.exception("the step loop failed")
            self._cause = f"{type(error).__name__} in the step loop: {error}"
        self._front.ended(self._cause)

    def _open(self, stack: ExitStack) -> None:
        options, endpoint = self._options, self._options.step_address(self._replica)
        curve_dir = Path(options.curve_dir) if options.curve_dir and endpoint.startswith("tcp://") else None
        invalid = InvalidMessages(self.metrics.invalid_messages.inc)
        if options.trace:
            path = recording_path(options.trace, self._replica)
            self._trace = RecordingWriter(path, options.trace_max_mib << 20, self._replica)
            stack.callback(self._trace.close)
        context = stack.enter_context(zmq.Context())
        if curve_dir is not None:
            stack.callback(start_authenticator(context, curve_dir).stop)
        self._heartbeats = Heartbeats(
            context, heartbeat_endpoint(endpoint), curve_dir, instance=secrets.randbits(63), invalid=invalid
        )
        self._heartbeats.start_bound()
        stack.callback(self._heartbeats.stop)
        self._workers = Workers(
            context,
            endpoint,
            curve_dir,
            Terms.of(options),
            self._heartbeats,
            invalid,
            rendezvous=rendezvous_of(options, self._replica),
            in_lockstep=options.in_lockstep,
            heartbeat_timeout=options.heartbeat_timeout,
            step_timeout=options.step_timeout,
        )
        # Read when the stack unwinds: orderly unless there is a cause.
        stack.callback(lambda: self._workers.close(self._cause or ""))
        if options.in_lockstep:
            self._lockstep = Lockstep(stack, context, options, self._replica, curve_dir, self._workers, invalid)

    def _loop(self) -> None:
        poller = zmq.Poller()
        lockstep = self._lockstep
        for source in (*self._workers.sockets, *(lockstep.sockets if lockstep else ()), self._mailbox.fileno()):
            poller.register(source, zmq.POLLIN)
        now = time.monotonic()
        while not self._is_over:
            until = min(self._next_tick, self._workers.next_check(now))
            if lockstep is not None:
                until = min(until, lockstep.next_check(now))
            ready = dict(poller.poll(max(0, math.ceil((until - now) * 1000))))
            now = time.monotonic()
            events = self._workers.receive(now)
            if self._mailbox.fileno() in ready:
                for command in self._mailbox.take():
                    self._obey(command, now)
            self._requests.expire(now)
            self._handle(events, now)
            is_tick = now >= self._next_tick
            if is_tick or now >= until:
                self._check(now)
            if lockstep is not None:
                self._handle(lockstep.exchange(ready, now), now)
            self._schedule()
            self._tell(is_tick)
            self._end_drain_if_done(now)
            now = time.monotonic()

    # --- Commands and events

    def _obey(self, command: commands.Command, now: float) -> None:
        match command:
            case commands.Stop():
                self._is_over = True
            case commands.Drain():
                if self._drain_deadline is None:
                    self._drain_deadline = now + self._options.drain_timeout
                    self._requests.is_draining = True
                    log.info("draining: running requests get %g s to finish", self._options.drain_timeout)
            case commands.Explain():
                core = self._requests.core
                _answer(command.answer, (core.explain(command.request_id) if core else [], now))
            case commands.CancelRequest():
                _answer(command.answer, self._requests.cancel_request(command.request_id, now))
            case commands.ResetPrefixCache():
                core = self._requests.core
                _answer(command.answer, core.reset_prefix_cache() if core else 0)
            case _:
                self._requests.handle(command, now)

    def _handle(self, events: list[Event], now: float) -> None:
        for event in events:
            match event:
                case StepReturned():
                    self._apply(event.result, now)
                case EpochBegun():
                    self._begin_epoch(event, now)
                case EpochEnded():
                    self._lose_workers(now)
                case Fatal():
                    self._is_over, self._cause, self.failed_for_good = True, event.cause, event.permanent

    def _begin_epoch(self, event: EpochBegun, now: float) -> None:
        model = event.model
        core = self._requests.core
        self._num_swap_blocks = event.num_swap_blocks
        if core is None:
            settings = core_settings(self._options, model, event.num_swap_blocks)
            core = Core(settings) if self._trace is None else RecordedCore(settings, self._trace)
            self._requests.core = core
            # What is there now stays: the collector need not look through it again and again between two steps.
            gc.collect()
            gc.freeze()
        else:
            if event.after_failure:
                self._blame_step(core, now)
            core.resize(model.num_blocks, event.num_swap_blocks, now=now)
            self._tell_ends(core)
        if self._lockstep is not None:
            self._lockstep.begin_epoch(core.settings.max_steps_in_flight)
        self._codec = StepCodec(event.epoch)
        self._heartbeats.epoch, self._heartbeats.step = event.epoch, 0
        welcome = scheduler_pb2.Welcome(
            protocol_version=PROTOCOL_VERSION,
            replica_id=str(self._replica),
            epoch=event.epoch,
            model=model,
            max_num_seqs=self._options.max_num_seqs,
        )
        self._requests.welcome_all(welcome)
        self._front.workers_changed(model)
        self._publish_status()
        log.info(
            "epoch %d is ready: %s, %d KV blocks of %d tokens, max_model_len %d",
            event.epoch, model.name, model.num_blocks, model.block_size, model.max_model_len,
        )  # fmt: skip

    def _blame_step(self, core: Core, now: float) -> None:
        num_alone = core.blame_step(now)
        if num_alone:
            log.warning("the workers failed twice in a row: %d requests are computed alone, to see why", num_alone)

    def _tell_ends(self, core: Core) -> None:
        """Ends that no step brought about come after what the steps before gave."""
        self._collect_outputs()
        self._requests.collect_ends(core.take_ends())

    def _lose_workers(self, now: float) -> None:
        """Every step in flight is void."""
        self._clock.clear()
        core = self._requests.core
        if core is not None:
            self._num_lost_with_workers += core.load.num_running
            core.lose_workers(now)
        self._front.workers_changed(None)
        self._publish_status()

    # --- Steps

    def _apply(self, message: step_pb2.StepResult, now: float) -> None:
        core = self._requests.core
        if core is None or message.step != self._clock.awaited:
            log.debug("the result of step %d is ignored: step %s is awaited", message.step, self._clock.awaited)
            return
        self._telemetry.note_returned(message.step, self._clock.elapsed(now), now)
        try:
            outcome = self._codec.decode(message)
            if self._lockstep is not None:
                self._lockstep.note_result(message.step, message.num_tokens_of_all)
        except (ResultError, WaveError) as error:
            self._handle(self._workers.fail_epoch(f"the result of step {message.step} can't be used: {error}"), now)
            return
        self._clock.finish(now)
        self._requests.num_steps += 1
        for key, frame in outcome.prompt_logprobs:
            self._requests.collect_prompt_logprobs(key, frame)
        self._outputs.append(core.apply(outcome.result, now))

    def _schedule(self) -> None:
        """Plans and sends steps, until as many are in flight as may be, or nothing more can run."""
        core = self._requests.core
        while core is not None and self._workers.is_ready:
            began = time.monotonic()
            plan = self._next_plan(core, began)
            if plan is None:
                return
            self._clock.send(plan.step, began)
            events = self._workers.send_plan(self._codec.encode(plan))
            self._heartbeats.step = plan.step
            self._telemetry.note_sent(plan, began)
            self._handle(events, began)

    def _next_plan(self, core: Core, now: float) -> Plan | None:
        """None: nothing can run, or may not yet. Where others compute steps, too, there may be nothing to run in it."""
        lockstep, step = self._lockstep, self._codec.step + 1
        if lockstep is not None and not self._is_in_wave(lockstep, step):
            if core.has_work:
                lockstep.want_wave(step, now)
            return None
        plan = core.schedule(now) if core.has_work else None
        warn_of_preemptions(core.take_events(), self._requests.trace_id)
        if lockstep is not None:
            plan = plan or core.schedule_empty()
            if plan is not None:
                lockstep.note_sent(plan)
        return plan

    def _is_in_wave(self, lockstep: Lockstep, step: int) -> bool:
        try:
            return lockstep.is_in_wave(step)
        except WaveError as error:
            self._handle(self._workers.end_epoch(str(error)), time.monotonic())
            return False

    def _collect_outputs(self) -> None:
        outputs, self._outputs = self._outputs, []
        for each in outputs:
            self._requests.collect(each)

    def _tell(self, repeat_load: bool) -> None:
        """Hands the routers what there is for them, and publishes the status."""
        self._collect_outputs()
        batch = self._requests.take_messages(workers_ready=self._workers.is_ready, repeat_load=repeat_load)
        if batch or repeat_load:
            self._publish_status()
        if batch:
            self._front.deliver(batch)
        self._telemetry.tell_ended(self._requests.core, self._requests.take_ended())

    def _publish_status(self) -> None:
        core = self._requests.core
        status = SchedulerStatus(
            stats=CoreStats() if core is None else core.stats,
            model_name=self._requests.model_name,
            num_swap_blocks=self._num_swap_blocks,
            num_lost_with_workers=self._num_lost_with_workers,
            epoch=self._workers.epoch,
            workers_ready=self._workers.is_ready,
            draining=self._requests.is_draining,
            workers=self._describe_workers(),
            num_waves=0 if self._lockstep is None else self._lockstep.num_waves,
        )
        self.status = status if core is None else dataclasses.replace(status, load=core.load)

    def _describe_workers(self) -> str:
        text = self._workers.describe()
        waiting_for = "" if self._lockstep is None else self._lockstep.waiting_for
        return f"{text}; all replicas wait for {waiting_for}" if waiting_for else text

    # --- Time

    def _check(self, now: float) -> None:
        self._handle(self._workers.tick(now), now)
        if (elapsed := self._clock.elapsed(now)) > self._options.step_timeout:
            cause = (
                f"step {self._clock.awaited} has not returned for {elapsed:.1f} s "
                f"(step_timeout={self._options.step_timeout:g})"
            )
            if self._lockstep is not None and self._lockstep.waiting_for:
                cause += f"; all wait for {self._lockstep.waiting_for}"
            self._handle(self._workers.give_up_step(cause), now)
        if now >= self._next_tick:
            self._next_tick = now + _TICK_S
            self._stats_log.tick(self.status, now)
            if self._trace is not None:
                self._trace.flush()

    def _end_drain_if_done(self, now: float) -> None:
        if self._drain_deadline is None:
            return
        if not self._requests.has_work and not self._is_needed():
            self._is_over = True
        elif now >= self._drain_deadline:
            log.warning("drain_timeout=%g s has passed: what still runs ends now", self._options.drain_timeout)
            self._is_over = True

    def _is_needed(self) -> bool:
        """Other replicas have something to run, and can't without this one; they may be draining, too."""
        lockstep = self._lockstep
        return lockstep is not None and self._workers.is_ready and self._is_in_wave(lockstep, self._codec.step + 1)


def _answer(future: Future[Answer], answer: Answer) -> None:
    """Unless whoever asked has gone."""
    if future.set_running_or_notify_cancel():
        future.set_result(answer)
