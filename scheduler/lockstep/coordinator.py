"""The end of the coordination wire where all replicas meet: a ROUTER in replica 0's scheduler.

protos/coordination.proto describes the protocol. The coordinator runs on the step loop's thread like the rest of the
scheduler: a stuck step loop means a stuck replica.
"""

import logging
import secrets
import time
from pathlib import Path

import zmq
from google.protobuf.message import DecodeError

from configs.options import Options
from protos import coordination_pb2 as pb
from runtime.awake_time import AwakeTime
from runtime.wire import COORDINATION_MESSAGE_BYTES, coordination_endpoint, replica_identity
from runtime.zmq_frames import Frames
from scheduler.lockstep.agreement import Agreement
from scheduler.ranks.epochs import common_rendezvous
from scheduler.sockets import InvalidMessages, bind_zmq, close_monitored

log = logging.getLogger("octavo.scheduler")

# Small, because a state that a member has not read is worthless once there is a newer one.
_SEND_QUEUE = 64
_MAX_MESSAGES = 256
_INTERVAL_S = 1.0
# ZeroMQ reports a disconnect a little before it forgets the peer, so the state is sent again to see which are left.
_PROBE_DELAYS_S = (0.0, 0.02, 0.2)


class Coordinator:
    """Collects the states of the replicas, and sends the agreement to all: when it changes, and each second."""

    def __init__(
        self,
        context: zmq.Context,
        options: Options,
        curve_dir: Path | None,
        invalid: InvalidMessages,
        awake: AwakeTime,
    ) -> None:
        """Raises AddressError or CurveError."""
        self.socket = bind_zmq(
            context,
            coordination_endpoint(options.step_address(0)),
            curve_dir,
            max_message_bytes=COORDINATION_MESSAGE_BYTES,
            queue=_SEND_QUEUE,
            timeout=options.heartbeat_timeout,
            # Identities hold a random number of their process: a second connection is the same one again.
            takes_over=True,
        )
        self._frames = Frames(self.socket)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._agreement = Agreement(
            options,
            common_rendezvous(options),
            awake,
            instance=secrets.randbits(63),
            # The time, so that it keeps growing across restarts.
            epoch=int(time.time() * 1000),
            heartbeat_timeout=options.heartbeat_timeout,
        )
        self._invalid = invalid
        # The state sent to all last.
        self._told = b""
        self._due = 0.0
        self._probe_times: list[float] = []

    def next_check(self, now: float) -> float:
        """The time to call `serve` next if nothing arrives."""
        return min(self._due, *self._probe_times[:1], now + _INTERVAL_S)

    def serve(self, now: float) -> None:
        """Handles the messages that have arrived, and sends the agreement if it is due or has changed."""
        for _ in range(_MAX_MESSAGES):
            if (frames := self._frames.receive()) is None:
                break
            self._hear(frames, now)
        while self.monitor.poll(0):
            self.monitor.recv_multipart()
            self._probe_times = [now + delay for delay in _PROBE_DELAYS_S]
        is_due = now >= self._due or (bool(self._probe_times) and self._probe_times[0] <= now)
        self._probe_times = [at for at in self._probe_times if at > now]
        if now >= self._due:
            self._due = now + _INTERVAL_S
            self._agreement.tick(now)
        if is_due:
            self._told = b""
        # Sending may find replicas that are gone, which changes the agreement again.
        while (state := self._agreement.group.SerializeToString()) != self._told:
            self._told = state
            self._tell_all(state)

    def close(self) -> None:
        close_monitored(self.socket, self.monitor)
        self._agreement.close()

    def _hear(self, frames: list[bytes], now: float) -> None:
        peer = frames[0]
        try:
            state = pb.ReplicaState.FromString(b"".join(frames[1:]))
        except DecodeError:
            self._invalid.note(peer, "bytes that are not a ReplicaState")
            return
        if len(frames) != 2 or peer != replica_identity(state.replica, state.instance):
            self._invalid.note(peer, f"a ReplicaState of {len(frames) - 1} frames that names another peer")
            return
        if objection := self._agreement.objection(state):
            log.error("replica %d is refused: %s", state.replica, objection)
            self._send(peer, pb.GroupState(refusal=objection).SerializeToString())
            return
        self._agreement.hear(state, now)

    def _tell_all(self, state: bytes) -> None:
        for replica, instance in self._agreement.members:
            if not self._send(replica_identity(replica, instance), state):
                self._agreement.lose(replica, "has disconnected")

    def _send(self, peer: bytes, message: bytes) -> bool:
        """False if the peer is gone or does not read."""
        try:
            self.socket.send_multipart([peer, message], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True
