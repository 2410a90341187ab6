"""A worker's reports about itself: what a rank computes, its progress, heartbeats on a thread
of their own, and metrics."""

import logging
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import zmq
from google.protobuf.message import DecodeError
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from configs import features
from protos import step_pb2
from runtime.awake_time import AwakeTime
from runtime.progress.watchdog import LoopProgress, Stillness
from worker.process.link import make_dealer
from worker.step.runner import StepRunner


def make_ready(runner: StepRunner, *, epoch: int, rank: int) -> step_pb2.Ready:
    return step_pb2.Ready(
        epoch=epoch,
        rank=rank,
        model=runner.model_info,
        num_swap_blocks=runner.num_swap_blocks,
        features=sorted(features.of_worker(runner.model_info)),
        holds_constrained=runner.holds_constrained,
        drafter=runner.drafter,
        encoder_cache_size=0 if runner.items is None else runner.items.cache_size,
    )


_log = logging.getLogger("octavo.worker")

_INTERVAL = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusSnapshot:
    state: step_pb2.WorkerState = step_pb2.WORKER_STATE_UNSPECIFIED
    epoch: int = 0
    # The latest step that was begun.
    step: int = 0
    # Steps whose results have not been sent; above 0 exactly when the state is STEPPING.
    num_in_flight: int = 0
    progress: float = 0.0
    # When this state began, or when the oldest step in flight became the oldest (monotonic seconds).
    since: float = 0.0

    @property
    def oldest_step(self) -> int:
        """The step whose result is sent next, if any is in flight."""
        return self.step - self.num_in_flight + 1


class WorkerStatus:
    """The worker's current state, written by its loop and read by heartbeats and /health."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._snapshot = StatusSnapshot()
        # Turns of the worker's loop and changes of its state: a step may be computed within one turn.
        self.num_turns = 0

    def turn(self) -> None:
        """Counts a turn of the loop."""
        with self._lock:
            self.num_turns += 1

    def snapshot(self) -> StatusSnapshot:
        with self._lock:
            return self._snapshot

    def set(
        self,
        state: step_pb2.WorkerState,
        *,
        epoch: int | None = None,
        step: int | None = None,
        progress: float | None = None,
    ) -> None:
        """Enters a state in which no step is in flight. None keeps a field's value."""
        with self._lock:
            old = self._snapshot
            self.num_turns += 1
            self._snapshot = StatusSnapshot(
                state=state,
                epoch=old.epoch if epoch is None else epoch,
                step=old.step if step is None else step,
                progress=old.progress if progress is None else progress,
                since=time.monotonic(),
            )

    def begin_step(self, step: int) -> None:
        """Adds a step to those in flight. A step's time starts when the steps before it have ended."""
        with self._lock:
            old = self._snapshot
            self.num_turns += 1
            self._snapshot = StatusSnapshot(
                state=step_pb2.WORKER_STATE_STEPPING,
                epoch=old.epoch,
                step=step,
                num_in_flight=old.num_in_flight + 1,
                progress=old.progress,
                since=old.since if old.num_in_flight else time.monotonic(),
            )

    def end_step(self) -> None:
        """Removes the oldest step from those in flight: its result has been sent."""
        with self._lock:
            old = self._snapshot
            self.num_turns += 1
            assert old.num_in_flight, "no step is in flight"
            num_in_flight = old.num_in_flight - 1
            self._snapshot = StatusSnapshot(
                state=step_pb2.WORKER_STATE_STEPPING if num_in_flight else step_pb2.WORKER_STATE_IDLE,
                epoch=old.epoch,
                step=old.step,
                num_in_flight=num_in_flight,
                progress=old.progress,
                since=time.monotonic(),
            )


class HeartbeatThread(threading.Thread):
    """Sends a heartbeat each second and watches the answers.

    `num_losses` counts how often the scheduler was lost: it is a new process since the last Reset or answer, or is back
    after a silence longer than `timeout`. In both cases it no longer knows this rank. Time in which this process stood
    still is no silence. `on_loss` is called then, on this thread.
    """

    def __init__(
        self,
        context: zmq.Context,
        endpoint: str,
        curve_dir: Path | None,
        status: WorkerStatus,
        *,
        rank: int,
        instance: int,
        timeout: float,
        on_loss: Callable[[], None],
    ) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._context, self._endpoint, self._curve_dir = context, endpoint, curve_dir
        self._status, self._rank, self._instance, self._timeout = status, rank, instance, timeout
        self._on_loss = on_loss
        self._stop_reader, self._stop_writer = socket.socketpair()
        self.num_losses = 0
        self._lock = threading.Lock()
        self._awake = AwakeTime(_INTERVAL)
        self._scheduler: int | None = None
        self._last_answer = 0.0

    def follow(self, scheduler: int) -> None:
        """Notes the scheduler instance that sent a Reset; it may not have answered a heartbeat yet."""
        with self._lock:
            self._scheduler, self._last_answer = scheduler, time.monotonic()

    def forget(self) -> None:
        """Notes that this rank follows no scheduler any more, so that the next answer is no loss."""
        with self._lock:
            self._scheduler = None

    def stop(self) -> None:
        """Ends and joins the thread."""
        self._stop_writer.send(b"x")
        self.join()
        self._stop_writer.close()
        self._stop_reader.close()

    def run(self) -> None:
        identity = f"heartbeat-{self._rank}-{secrets.token_hex(4)}".encode()
        dealer = make_dealer(self._context, self._endpoint, self._curve_dir, identity, timeout=self._timeout)
        try:
            dealer.connect(self._endpoint)
            self._beat(dealer)
        finally:
            dealer.close(linger=0)

    def _beat(self, dealer: zmq.Socket) -> None:
        poller = zmq.Poller()
        poller.register(dealer, zmq.POLLIN)
        poller.register(self._stop_reader, zmq.POLLIN)
        next_beat = time.monotonic()
        while True:
            now = time.monotonic()
            self._awake.wake(now)
            wait = next_beat - now
            if wait <= 0:
                self._send(dealer)
                next_beat = time.monotonic() + _INTERVAL
                continue
            ready = dict(poller.poll(math.ceil(wait * 1000)))
            if self._stop_reader in ready or self._stop_reader.fileno() in ready:
                return
            if dealer in ready:
                self._receive(dealer)

    def _send(self, dealer: zmq.Socket) -> None:
        now = self._status.snapshot()
        beat = step_pb2.Heartbeat(
            rank=self._rank,
            epoch=now.epoch,
            state=now.state,
            step=now.step,
            instance=self._instance,
            progress=now.progress,
        )
        try:
            dealer.send(beat.SerializeToString(), zmq.NOBLOCK)
        except zmq.Again:
            _log.debug("nothing receives heartbeats at %s", self._endpoint)

    def _receive(self, dealer: zmq.Socket) -> None:
        try:
            answer = step_pb2.Heartbeat.FromString(dealer.recv(zmq.NOBLOCK))
        except DecodeError:
            _log.warning("an answer to a heartbeat could not be read; it is ignored")
            return
        now = time.monotonic()
        self._awake.wake(now)
        with self._lock:
            before, silence = self._scheduler, self._awake.seconds(self._last_answer, now)
            self._scheduler, self._last_answer = answer.instance, now
        if before is None:
            return
        if answer.instance != before:
            self._lose("another scheduler answers: it was restarted")
        elif silence > self._timeout:
            self._lose(f"the scheduler is back after {silence:.1f} s of silence")

    def _lose(self, how: str) -> None:
        _log.warning("%s", how)
        self.num_losses += 1
        self._on_loss()


# Bytes per entry of the columns in step.proto.
_ROW_BYTES, _TOKEN_ID_BYTES = 2, 4
_STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class WorkerMetrics:
    """Metrics of one rank, in a registry of their own."""

    def __init__(self, status: Callable[[], StatusSnapshot]) -> None:
        """status: returns the current snapshot; called at each scrape, on any thread."""
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._step_seconds = Histogram(
            "octavo_worker_step_seconds",
            "From a plan's arrival to its result's dispatch.",
            registry=self.registry,
            buckets=_STEP_BUCKETS,
        )
        self._part_seconds = Counter(
            "octavo_worker_step_part_seconds", "Time within steps, by part.", ["part"], registry=self.registry
        )
        self._tokens = Counter("octavo_worker_tokens", "Tokens computed.", registry=self.registry)
        self._sampled = Counter("octavo_worker_sampled_tokens", "Tokens sampled.", registry=self.registry)
        self._swapped = Counter(
            "octavo_worker_swapped_blocks",
            "KV blocks copied out to host memory, or back in.",
            ["direction"],
            registry=self.registry,
        )
        self._failed = Counter(
            "octavo_worker_failed_sequences",
            "Sequences whose logits were not finite, or that had no token left.",
            registry=self.registry,
        )
        self._items = Counter("octavo_worker_encoded_items", "Images and videos encoded.", registry=self.registry)
        self._item_seconds = Counter(
            "octavo_worker_encoder_seconds",
            "Time within steps in which images and videos were encoded; on a GPU, to launch it.",
            registry=self.registry,
        )
        self._item_inputs = Gauge(
            "octavo_worker_item_input_bytes",
            "Bytes of images and videos, decoded and resized, that are kept to be encoded.",
            registry=self.registry,
        )
        self._failures = Counter(
            "octavo_worker_epoch_failures",
            "Epochs ended by an invalid message or a failed step.",
            registry=self.registry,
        )
        self._rows = Gauge("octavo_worker_rows", "Rows that hold a sequence.", registry=self.registry)
        for name, help in (
            ("state", "1 loading, 2 compiling, 3 idle, 4 stepping."),
            ("epoch", "The epoch in force."),
            ("progress", "Progress of loading, 0 to 1."),
        ):
            gauge = Gauge(f"octavo_worker_{name}", help, registry=self.registry)
            gauge.set_function(lambda name=name: float(getattr(status(), name)))

    def count_step(self, plan: step_pb2.StepPlan, result: step_pb2.StepResult, runner: StepRunner) -> None:
        """Counts one step of the runner."""
        timing = result.timing
        self._step_seconds.observe(timing.total)
        self._part_seconds.labels("forward").inc(timing.forward)
        self._part_seconds.labels("sample").inc(timing.sample)
        self._part_seconds.labels("other").inc(max(0.0, timing.total - timing.forward - timing.sample))
        num_decodes = (len(plan.decode_rows) + len(plan.rows_with_drafts)) // _ROW_BYTES
        self._tokens.inc(num_decodes + len(plan.draft_token_ids) // _TOKEN_ID_BYTES + sum(plan.num_tokens))
        self._sampled.inc(len(result.token_ids) // _TOKEN_ID_BYTES)
        if plan.swap_out_blocks or plan.swap_in_blocks:
            self._swapped.labels("out").inc(len(plan.swap_out_blocks))
            self._swapped.labels("in").inc(len(plan.swap_in_blocks))
        self._failed.inc(len(result.failed_sequences))
        if runner.items is not None and (plan.encoded_items or plan.forgotten_items):
            self._items.inc(len(plan.encoded_items))
            self._item_seconds.inc(runner.items.take_seconds())
            self._item_inputs.set(runner.items.num_input_bytes)
        self._rows.set(runner.num_live_rows)

    def count_epoch_failure(self) -> None:
        self._failures.inc()


# The scheduler gives up a step after step_timeout. If the step returns a little later, the weights stay loaded.
_LONGEST_GRACE_S = 10.0
_STEPPING = step_pb2.WORKER_STATE_STEPPING
_LOADING = (step_pb2.WORKER_STATE_LOADING, step_pb2.WORKER_STATE_COMPILING)


class WorkerProgress:
    """The progress of a worker's loop and of its steps, for runtime.progress.watchdog: nothing but the process's end
    interrupts a kernel that hangs. It is not judged while it loads or waits for other ranks, which may take
    any time."""

    def __init__(self, status: WorkerStatus, *, step_timeout: float, hang_timeout: float) -> None:
        self._status, self._step_timeout = status, step_timeout
        self._step_bound_s = step_timeout + min(step_timeout, _LONGEST_GRACE_S)
        self._loop = LoopProgress("the worker's loop", hang_timeout)

    def stillness(self, now: float, awake: AwakeTime) -> Stillness | None:
        status = self._status.snapshot()
        self._loop.turns = self._status.num_turns
        if status.state in _LOADING:
            return None
        if status.state != _STEPPING:
            return self._loop.stillness(now, awake)
        return Stillness(
            what=f"step {status.oldest_step} has not returned",
            seconds=awake.seconds(status.since, now),
            bound_s=self._step_bound_s,
            option=f"step_timeout={self._step_timeout:g}",
        )
