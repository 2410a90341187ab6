"""The thread that owns the core and ZeroMQ: takes results and commands in, sends plans and outputs out.

What matters is the time from a step's result to the next plan, because the workers may idle meanwhile. So the loop
applies a result, makes and sends the next plans, and only then packs the outputs into messages for the routers. It
handles cancels and deadlines before results, so that no output mentions a sequence that they have ended.
"""

import dataclasses
import gc
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeVar

import zmq

from configs import features
from configs.options import Options
from protos import scheduler_pb2
from runtime.progress.watchdog import LoopProgress
from runtime.telemetry.lag import WatchedThread
from runtime.telemetry.tracing import Tracing
from runtime.wire import PROTOCOL_VERSION
from scheduler.core.core import Core
from scheduler.ranks.epochs import EpochBegun, EpochEnded, Event, Fatal, ItemAnswered, StepReturned
from scheduler.recording.recorded_core import RecordedCore
from scheduler.sessions import commands
from scheduler.sessions.items import ItemMemory, ItemStore
from scheduler.sessions.kv_events.publisher import KvEventPublisher
from scheduler.sessions.observation import Observation
from scheduler.sessions.requests import Requests
from scheduler.settings import core_settings
from scheduler.sockets import InvalidMessages
from scheduler.step_loop.connections import LONGEST_WAIT_S, Connections, open_connections
from scheduler.step_loop.item_flow import ItemFlow
from scheduler.step_loop.pause import Pauses
from scheduler.step_loop.pipeline import StepPipeline
from scheduler.telemetry.metrics import SchedulerMetrics, SchedulerStatus
from scheduler.telemetry.reports import Reports

if TYPE_CHECKING:
    # It has the step loop, which tells it what routers get.
    from scheduler.server import SchedulerServer

log = logging.getLogger("octavo.scheduler")

Answer = TypeVar("Answer")

_TICK_S = LONGEST_WAIT_S
# The status that other threads read is at most this old while requests run, and new when none is left.
_STATUS_S = 0.1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The end of the loop. cause: why it failed; None if it was asked to end. permanent: a restart would fail in the
    same way."""

    cause: str | None = None
    permanent: bool = False


class StepLoop(threading.Thread):
    """Runs from `start_bound` until Drain, Stop or a fatal failure."""

    def __init__(
        self,
        options: Options,
        replica: int,
        mailbox: commands.Mailbox,
        front: "SchedulerServer",
        tracing: Tracing | None = None,
    ) -> None:
        """tracing: None if requests are not traced."""
        super().__init__(name="step-loop", daemon=True)
        self._options, self._replica = options, replica
        self._mailbox, self._front = mailbox, front
        self._bound: Future[None] = Future()
        self._reports = Reports(options, replica, tracing)
        # For runtime.telemetry.lag.
        self.watched = WatchedThread("step_loop", self._reports.metrics.lag)
        self.progress = LoopProgress("step_loop", options.hang_timeout)
        # Shared with the gRPC thread.
        self.item_memory = ItemMemory(int(options.item_memory * 2**30))
        # None unless outside routers are told of the prefix cache.
        self._kv_events = KvEventPublisher.of(options, replica)
        self._requests = Requests(
            ItemStore(self.item_memory), None if self._kv_events is None else self._kv_events.publish
        )
        # None until the first pause.
        self._pauses: Pauses | None = None
        # None until the workers of the first epoch report their blocks and limits.
        self._core: Core | None = None
        self._num_lost_with_workers = 0
        self._next_tick = self._next_status = 0.0
        self._is_status_old = False
        # The latest end of a drain; None if none was asked for.
        self._drain_deadline: float | None = None
        self._ending: Ending | None = None

    def start_bound(self) -> None:
        """Starts the thread; returns once the sockets are bound. Raises AddressError, CurveError, RecordingError, or
        whatever else made it fail."""
        self.start()
        self._bound.result()

    # --- For other threads

    @property
    def metrics(self) -> SchedulerMetrics:
        return self._reports.metrics

    @property
    def status(self) -> SchedulerStatus:
        return self._reports.status

    @property
    def core(self) -> Core | None:
        """The core, for use after the thread has been joined; None if no epoch ever began."""
        return self._core

    @property
    def failed_for_good(self) -> bool:
        """True if the loop has failed, and a restart would fail in the same way."""
        return self._ending is not None and self._ending.permanent

    # --- The loop

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
            cause = f"{type(error).__name__} in the step loop: {error}"
            self._ending = Ending(cause=cause, permanent=self.failed_for_good)
            if not self._bound.done():
                self._bound.set_exception(error)
                return
        self._front.ended(self._cause)

    def _open(self, stack: ExitStack) -> None:
        if self._kv_events is not None:
            self._kv_events.start_bound()
            stack.callback(self._kv_events.stop)
        self._connections: Connections = open_connections(
            stack,
            self._options,
            self._replica,
            InvalidMessages(self.metrics.invalid_messages.inc),
            failure=lambda: self._cause or "",
        )
        self._pipeline = StepPipeline(
            self._connections, self._requests, self._reports, step_timeout=self._options.step_timeout
        )
        self._items = ItemFlow(self._connections.workers, self._requests)

    @property
    def _cause(self) -> str | None:
        return None if self._ending is None else self._ending.cause

    def _loop(self) -> None:
        workers, lockstep, mailbox = self._connections.workers, self._connections.lockstep, self._mailbox.fileno()
        poller = zmq.Poller()
        for source in (*workers.sockets, *(lockstep.sockets if lockstep else ()), mailbox):
            poller.register(source, zmq.POLLIN)
        now = time.monotonic()
        self.watched.begin()
        while self._ending is None:
            check_at = min(self._next_tick, workers.next_check(now))
            until = min(check_at, self._pipeline.next_check(now))
            if self._is_status_old:
                until = min(until, self._next_status)
            if lockstep is not None:
                until = min(until, lockstep.next_check(now))
            ready = dict(poller.poll(max(0, math.ceil((until - now) * 1000))))
            now = time.monotonic()
            self._connections.awake.wake(now)
            self.watched.work(now)
            self.progress.turns += 1
            events = workers.receive(now, ready)
            if mailbox in ready:
                for command in self._mailbox.take():
                    self._run_command(command, now)
            self._requests.expire(now)
            if events:
                self._handle(events, now)
            is_tick = now >= self._next_tick
            if now >= check_at:
                self._check(now)
            if lockstep is not None:
                self._handle(lockstep.exchange(ready, now), now)
            pauses = self._pauses
            if (pauses is None or not pauses.is_frozen) and (events := self._pipeline.schedule()):
                self._handle(events, time.monotonic())
            if pauses is not None:
                pauses.settle(self._core)
            if self._items.waiting or (self._core is not None and self._core.has_wanted_items):
                self._handle(self._items.send(now), time.monotonic())
            self._send_messages(is_tick, now)
            if self._drain_deadline is not None:
                self._end_drain_if_done(self._drain_deadline, now)
            now = time.monotonic()
            self.watched.rest(now)

    # --- Commands and events

    def _run_command(self, command: commands.Command, now: float) -> None:
        core = self._core
        match command:
            case commands.Stop():
                self._ending = self._ending or Ending()
            case commands.Drain():
                if self._drain_deadline is None:
                    self._drain_deadline = now + self._options.drain_timeout
                    self._requests.drain()
                    log.info("draining: running requests get %g s to finish", self._options.drain_timeout)
            case commands.Explain():
                _answer(command.answer, (core.explain(command.request_id) if core else [], now))
            case commands.Observe():
                _answer(command.answer, self._observe(now))
            case commands.CancelRequest():
                _answer(command.answer, self._requests.cancel_request(command.request_id, now))
            case commands.Pause():
                if self._pauses is None:
                    self._pauses = Pauses(self._requests)
                self._pauses.take(command, now)
            case commands.ResetPrefixCache():
                _answer(command.answer, core.reset_prefix_cache() if core else 0)
            case _:
                self._requests.handle(command, now)

    def _observe(self, now: float) -> Observation:
        core, status = self._core, self._reports.status
        settings = None if core is None else core.settings
        return Observation(
            load=status.load if core is None else core.load,
            stats=status.stats if core is None else core.stats,
            look=None if core is None else core.look(),
            epoch=status.epoch,
            workers_ready=self._connections.workers.is_ready,
            draining=self._drain_deadline is not None,
            workers=self._connections.workers.describe(),
            max_num_seqs=self._options.max_num_seqs if settings is None else settings.max_num_seqs,
            max_num_batched_tokens=self._options.max_num_batched_tokens,
            block_size=status.block_size,
            ranks=tuple(self._connections.workers.see(now)),
            steps=self._reports.watch_steps(now),
        )

    def _handle(self, events: Iterable[Event], now: float) -> None:
        waiting = deque(events)
        while waiting:
            match event := waiting.popleft():
                case StepReturned():
                    # The events that this one causes come before the next one.
                    waiting.extendleft(reversed(self._pipeline.apply(event.result, now)))
                case ItemAnswered():
                    # The outputs of earlier steps go before the ends of sequences whose item has failed.
                    self._collect_outputs()
                    self._items.take(event, now)
                case EpochBegun():
                    self._begin_epoch(event, now)
                case EpochEnded():
                    self._lose_workers(now)
                case Fatal():
                    self._ending = Ending(cause=event.cause, permanent=event.permanent)

    def _begin_epoch(self, event: EpochBegun, now: float) -> None:
        model, core = event.model, self._core
        if core is None:
            settings, recording = (
                core_settings(
                    self._options,
                    model,
                    event.num_swap_blocks,
                    holds_constrained=event.holds_constrained,
                    drafter=event.drafter,
                    encoder_cache_size=event.encoder_cache_size,
                ),
                self._connections.recording,
            )
            core = self._core = Core(settings) if recording is None else RecordedCore(settings, recording)
            # The objects that exist now stay: freezing spares the collector from scanning them between two steps.
            gc.collect()
            gc.freeze()
        else:
            if event.after_failure:
                self._blame_step(core, now)
            core.resize(model.num_blocks, event.num_swap_blocks, encoder_cache_size=event.encoder_cache_size, now=now)
            # The outputs of earlier steps go first, then the ends that no step caused.
            self._collect_outputs()
            self._requests.collect_ends(core.take_ends())
        self._pipeline.begin_epoch(core, event.epoch)
        self._items.begin_epoch(core, event.epoch)
        welcome = scheduler_pb2.Welcome(
            protocol_version=PROTOCOL_VERSION,
            replica_id=str(self._replica),
            epoch=event.epoch,
            model=model,
            max_num_seqs=self._options.max_num_seqs,
            features=sorted(_features(event)),
            max_logprobs=min(event.max_logprobs, self._options.max_logprobs),
        )
        self._requests.begin_epoch(core, welcome)
        self._front.workers_changed(model)
        self._publish_status()
        log.info(
            "epoch %d is ready: %s, %d KV blocks of %d tokens, max_model_len %d",
            event.epoch,
            model.name,
            model.num_blocks,
            model.block_size,
            model.max_model_len,
        )

    def _blame_step(self, core: Core, now: float) -> None:
        num_alone = core.blame_step(now)
        if num_alone:
            log.warning("the workers failed twice in a row: %d suspects are computed alone, one by one", num_alone)

    def _lose_workers(self, now: float) -> None:
        """Ends an epoch: every step in flight is void."""
        self._pipeline.void()
        self._items.void()
        if self._core is not None:
            self._num_lost_with_workers += self._core.load.num_running
            self._core.lose_workers(now)
        self._front.workers_changed(None)
        self._publish_status()

    # --- For the routers

    def _collect_outputs(self) -> None:
        for outputs in self._pipeline.take_outputs():
            self._requests.collect(outputs)

    def _send_messages(self, is_tick: bool, now: float) -> None:
        """Sends the routers their messages and publishes the status. is_tick: also to routers for which there is
        nothing but the load."""
        core = self._core
        if self._pipeline.outputs:
            self._collect_outputs()
        batch = self._requests.take_messages(
            steps=self._pipeline.totals,
            workers_ready=self._connections.workers.epochs.is_ready,
            repeat_load=is_tick,
        )
        self._is_status_old |= bool(batch)
        is_due = now >= self._next_status or core is None or not core.has_work
        if is_tick or (self._is_status_old and is_due):
            self._publish_status()
            self._is_status_old, self._next_status = False, now + _STATUS_S
        if batch:
            self._front.deliver(batch)
        if core is not None and self._requests.ended:
            self._reports.note_ended(core, self._requests.take_ended())

    def _publish_status(self) -> None:
        core, workers, lockstep = self._core, self._connections.workers, self._connections.lockstep
        waiting_for = "" if lockstep is None else lockstep.waiting_for
        status = SchedulerStatus(
            model_name=self._requests.model_name,
            num_lost_with_workers=self._num_lost_with_workers,
            epoch=workers.epoch,
            workers_ready=workers.is_ready,
            draining=self._drain_deadline is not None,
            workers=workers.describe() + (f"; all replicas wait for {waiting_for}" if waiting_for else ""),
            num_waves=0 if lockstep is None else lockstep.num_waves,
            num_item_bytes=self._requests.items.num_bytes,
            num_needed_item_bytes=self.item_memory.num_needed,
        )
        if core is not None:
            settings = core.settings
            status = dataclasses.replace(
                status,
                load=core.load,
                stats=core.stats,
                num_swap_blocks=settings.num_swap_blocks,
                block_size=settings.block_size,
            )
        self._reports.status = status

    # --- Time

    def _check(self, now: float) -> None:
        workers, recording = self._connections.workers, self._connections.recording
        self._handle(workers.tick(now), now)
        if cause := self._pipeline.overdue(now):
            self._handle(workers.give_up_step(cause), now)
        if now >= self._next_tick:
            self._next_tick = now + _TICK_S
            self._reports.tick(now)
            if recording is not None:
                recording.flush()

    def _end_drain_if_done(self, deadline: float, now: float) -> None:
        has_work = self._core is not None and self._core.has_work
        # Other replicas may still need this one for their steps, for example to drain.
        if not has_work and not self._pipeline.is_needed:
            self._ending = self._ending or Ending()
        elif now >= deadline:
            log.warning("drain_timeout=%g s has passed: requests that still run end now", self._options.drain_timeout)
            self._ending = self._ending or Ending()


def _features(event: EpochBegun) -> frozenset[str]:
    """The features of this replica. Items need room for their embeddings."""
    found = event.features | features.OF_SCHEDULERS
    return found if event.encoder_cache_size else found - {features.ITEMS}


def _answer(future: Future[Answer], answer: Answer) -> None:
    """Does nothing if the caller no longer waits."""
    if future.set_running_or_notify_cancel():
        future.set_result(answer)
