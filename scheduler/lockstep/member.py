"""A scheduler's part among replicas that compute their steps together: reports its state, follows the coordinator.

protos/coordination.proto describes the protocol. Runs on the step loop's thread.
"""

import logging
import secrets
from pathlib import Path

import zmq
from google.protobuf.message import DecodeError

from configs.options import Options
from protos import coordination_pb2 as pb
from runtime.awake_time import AwakeTime
from runtime.security.curve import client_curve
from runtime.wire import (
    COORDINATION_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    coordination_endpoint,
    octavo_version,
    replica_identity,
)
from runtime.zmq_frames import Frames
from runtime.zmq_silence import end_silent_connections
from scheduler.lockstep.agreement import common_options
from scheduler.ranks.epochs import Event, Fatal
from scheduler.ranks.workers import Workers
from scheduler.sockets import InvalidMessages, close_monitored

log = logging.getLogger("octavo.scheduler")

_INTERVAL_S = 1.0
_MAX_MESSAGES = 64
# Small, because a state that the coordinator has not read is worthless once there is a newer one.
_SEND_QUEUE = 16
_RECONNECT_MS, _LONGEST_RECONNECT_MS = 50, 1000
_LONGEST_TEXT = 1000
_MONITORED = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
_COORDINATOR = "the coordinator, in the scheduler of replica 0,"


class Member:
    """Begins and ends the epochs of this replica's ranks as the coordinator says, and reports their state to it."""

    def __init__(
        self,
        context: zmq.Context,
        options: Options,
        replica: int,
        curve_dir: Path | None,
        workers: Workers,
        invalid: InvalidMessages,
        awake: AwakeTime,
    ) -> None:
        """Raises CurveError."""
        self._workers, self._invalid, self._awake = workers, invalid, awake
        self._heartbeat_timeout = options.heartbeat_timeout
        self._state = pb.ReplicaState(
            protocol_version=PROTOCOL_VERSION,
            octavo_version=octavo_version(),
            replica=replica,
            instance=secrets.randbits(63),
            options=common_options(options),
        )
        self.socket = _connect(
            context,
            coordination_endpoint(options.step_address(0)),
            curve_dir,
            replica_identity(replica, self._state.instance),
            timeout=options.heartbeat_timeout,
        )
        self._frames = Frames(self.socket)
        self.monitor = self.socket.get_monitor_socket(_MONITORED)
        # The coordinator's latest message; None: it is not connected.
        self._group: pb.GroupState | None = None
        self._heard = 0.0
        # The urgent part of the state sent last; the rest may wait for the next second.
        self._told = b""
        self._due = 0.0

    # --- Steps

    @property
    def wave_step(self) -> int:
        """The first step of the latest wave in this epoch that is known here; 0: there was none."""
        group = self._group
        return group.wave_step if group is not None and group.epoch == self._workers.epoch else 0

    def want_wave(self, step: int, now: float) -> None:
        """Asks for a wave: there is work for the next step, `step`, but it is in no wave."""
        if self._state.wanted_step != step:
            self._state.wanted_step = step
            self._tell(now)

    def note_step(self, step: int) -> None:
        """Records the last step sent."""
        self._state.step = step

    # --- Epochs

    @property
    def waiting_for(self) -> str:
        """Names the replica that keeps the others waiting, for messages; empty: none does."""
        return f"{_COORDINATOR} which is not connected" if self._group is None else self._group.waiting_for

    def next_check(self, now: float) -> float:
        """The time to call `exchange` next if nothing arrives."""
        is_told = (self._state.condition == pb.REPLICA_CONDITION_READY) == self._workers.is_ready
        return self._due if is_told else now

    def exchange(self, now: float) -> list[Event]:
        """Hears and obeys the coordinator, then reports what has changed here."""
        events: list[Event] = []
        # Before the connection check: messages that the coordinator sent before it went still count.
        for _ in range(_MAX_MESSAGES):
            if (frames := self._frames.receive()) is None:
                break
            events += self._hear(frames, now)
        events += self._watch_connection(now)
        silence = self._awake.seconds(self._heard, now)
        if self._group is not None and silence > self._heartbeat_timeout:
            events += self._lose_coordinator(
                f"has been silent for {silence:.1f} s (heartbeat_timeout={self._heartbeat_timeout:g})"
            )
        self._note_state(now)
        if now >= self._due or self._urgent() != self._told:
            self._tell(now)
        return events

    def close(self) -> None:
        close_monitored(self.socket, self.monitor)

    # --- In

    def _hear(self, frames: list[bytes], now: float) -> list[Event]:
        try:
            group = pb.GroupState.FromString(b"".join(frames))
        except DecodeError:
            self._invalid.note(b"coordinator", "bytes that are not a GroupState")
            return []
        if group.refusal:
            return [Fatal(cause=f"replica 0 refuses this one: {group.refusal}", permanent=True)]
        events: list[Event] = []
        if self._group is not None and self._group.instance != group.instance:
            events += self._lose_coordinator("was restarted")
        self._group, self._heard = group, now
        return events + self._obey(group, now)

    def _obey(self, group: pb.GroupState, now: float) -> list[Event]:
        workers = self._workers
        if group.epoch < workers.epoch:
            return []  # the coordinator is new: this replica's next message tells it of the later epoch
        if group.epoch == workers.epoch:
            return [] if group.is_open else workers.end_epoch(group.cause)
        events = workers.end_epoch("the other replicas have gone on to a later epoch")
        if group.is_open and workers.is_complete(now):
            return events + workers.begin_epoch(group.epoch, group.rendezvous, now)
        workers.epochs.pass_over(group.epoch, workers.describe() if group.is_open else group.cause)
        return events

    def _watch_connection(self, now: float) -> list[Event]:
        events: list[Event] = []
        while self.monitor.poll(0):
            frame = self.monitor.recv_multipart()[0]
            if int.from_bytes(frame[:2], "little") == zmq.EVENT_DISCONNECTED:
                events += self._lose_coordinator("has disconnected")
            else:
                self._due = now
        return events

    def _lose_coordinator(self, how: str) -> list[Event]:
        """Ends the epoch: without the coordinator no replica learns the state of the others."""
        self._group = None
        return self._workers.end_epoch(f"{_COORDINATOR} {how}")

    # --- Out

    def _note_state(self, now: float) -> None:
        state, workers = self._state, self._workers
        if state.epoch != workers.epoch:
            state.epoch, state.step, state.wanted_step = workers.epoch, 0, 0
        state.store_address = workers.store_address
        state.fingerprint = workers.model.fingerprint if workers.model is not None else ""
        if workers.is_ready:
            state.condition = pb.REPLICA_CONDITION_READY
        elif workers.epochs.is_open:
            state.condition = pb.REPLICA_CONDITION_MEETING
        elif workers.is_complete(now):
            state.condition = pb.REPLICA_CONDITION_COMPLETE
        else:
            state.condition = pb.REPLICA_CONDITION_INCOMPLETE
        state.cause = "" if workers.epochs.is_open else workers.epochs.cause[:_LONGEST_TEXT]

    def _urgent(self) -> bytes:
        """The part of the state that is sent at once when it changes."""
        state = self._state
        return f"{state.epoch} {state.condition} {state.wanted_step} {state.store_address}".encode()

    def _tell(self, now: float) -> None:
        self._state.description = self._workers.describe()[:_LONGEST_TEXT]
        try:
            self.socket.send(self._state.SerializeToString(), zmq.NOBLOCK)
        except zmq.Again:
            log.debug("the coordinator does not take this replica's state")
        self._told, self._due = self._urgent(), now + _INTERVAL_S


def _connect(
    context: zmq.Context, endpoint: str, curve_dir: Path | None, identity: bytes, *, timeout: float
) -> zmq.Socket:
    """Makes a DEALER that keeps trying to connect, and queues nothing while it is not connected. timeout: seconds of
    silence after which it connects anew, over tcp. Raises CurveError."""
    socket: zmq.Socket = context.socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.SNDHWM, _SEND_QUEUE)
        socket.setsockopt(zmq.MAXMSGSIZE, COORDINATION_MESSAGE_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _LONGEST_RECONNECT_MS)
        end_silent_connections(socket, endpoint, timeout)
        if endpoint.startswith("tcp://") and curve_dir is not None:
            client_curve(socket, curve_dir)
        socket.connect(endpoint)
    except BaseException:
        socket.close(linger=0)
        raise
    return socket
