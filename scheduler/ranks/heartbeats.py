"""Heartbeats of the ranks, on a thread and socket of their own, so that a busy step loop delays no answer."""

import logging
import os
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import zmq
from google.protobuf.message import DecodeError

from protos import step_pb2
from runtime.zmq_frames import Frames
from scheduler.sockets import InvalidMessages, bind_zmq

log = logging.getLogger("octavo.scheduler")

_MAX_MESSAGE_BYTES = 4096
_MAX_PEERS = 4096
# Small, because an answer that a peer does not take is soon worthless.
_SEND_QUEUE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """A rank's latest heartbeat, and the time when it arrived (monotonic seconds)."""

    rank: int
    instance: int
    heard: float
    state: step_pb2.WorkerState
    epoch: int
    step: int
    progress: float


class Heartbeats(threading.Thread):
    """Answers each heartbeat at once and remembers the latest one of each (rank, instance)."""

    def __init__(
        self,
        context: zmq.Context,
        endpoint: str,
        curve_dir: Path | None,
        *,
        instance: int,
        invalid: InvalidMessages,
        timeout: float,
    ) -> None:
        """instance: a random number of this process; when it changes, ranks know that the scheduler was restarted.
        timeout: seconds of silence after which a tcp connection is closed."""
        super().__init__(name="heartbeats", daemon=True)
        self._context, self._endpoint, self._curve_dir, self._timeout = context, endpoint, curve_dir, timeout
        self.instance, self._invalid = instance, invalid
        self._stop_event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._beats: dict[tuple[int, int], Beat] = {}
        self._bound: Future[None] = Future()
        # Written by the step loop, sent to the ranks.
        self.epoch = 0
        self.step = 0

    def start_bound(self) -> None:
        """Starts the thread; returns once its socket is bound. Raises AddressError or CurveError."""
        self.start()
        self._bound.result()

    def latest(self, rank: int, instance: int) -> Beat | None:
        with self._lock:
            return self._beats.get((rank, instance))

    def stop(self) -> None:
        """Ends and joins the thread."""
        os.eventfd_write(self._stop_event, 1)
        self.join()
        os.close(self._stop_event)

    def run(self) -> None:
        try:
            socket = bind_zmq(
                self._context,
                self._endpoint,
                self._curve_dir,
                max_message_bytes=_MAX_MESSAGE_BYTES,
                queue=_SEND_QUEUE,
                timeout=self._timeout,
                # Identities are random, so that a second connection is the same rank again, after its first one broke.
                takes_over=True,
            )
        except Exception as error:  # noqa: BLE001 - whatever it is, `start_bound` waits for it
            self._bound.set_exception(error)
            return
        self._bound.set_result(None)
        try:
            self._serve(socket)
        finally:
            socket.close(linger=0)

    def _serve(self, socket: zmq.Socket) -> None:
        poller, frames = zmq.Poller(), Frames(socket)
        poller.register(socket, zmq.POLLIN)
        poller.register(self._stop_event, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._stop_event in ready:
                return
            if (message := frames.receive()) is not None:
                self._answer(socket, message)

    def _answer(self, socket: zmq.Socket, frames: list[bytes]) -> None:
        peer = frames[0]
        if len(frames) != 2:
            self._invalid.note(peer, f"a heartbeat of {len(frames) - 1} frames")
            return
        try:
            beat = step_pb2.Heartbeat.FromString(frames[1])
        except DecodeError:
            self._invalid.note(peer, f"{len(frames[1])} bytes that are not a Heartbeat")
            return
        self._remember(beat, time.monotonic())
        answer = step_pb2.Heartbeat(epoch=self.epoch, step=self.step, instance=self.instance)
        try:
            socket.send_multipart([peer, answer.SerializeToString()], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.debug("peer %r does not take the answer to its heartbeat: %s", peer, error)

    def _remember(self, beat: step_pb2.Heartbeat, now: float) -> None:
        key = beat.rank, beat.instance
        with self._lock:
            if key not in self._beats and len(self._beats) >= _MAX_PEERS:
                self._beats.clear()  # some peer makes up instances; live ranks are back in a second
            self._beats[key] = Beat(
                rank=beat.rank,
                instance=beat.instance,
                heard=now,
                state=beat.state,
                epoch=beat.epoch,
                step=beat.step,
                progress=beat.progress,
            )
