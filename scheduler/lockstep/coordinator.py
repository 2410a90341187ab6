"""The end of the coordination wire at which all replicas meet: a ROUTER in replica 0's scheduler.

The protocol is told in protos/coordination.proto. On the step loop's thread, as the rest of the scheduler: a step loop
that is stuck is a replica that is.
"""

import logging
import secrets
import time
from pathlib import Path

import zmq
from google.protobuf.message import DecodeError

from configs.options import Options
from protos import coordination_pb2 as pb
from runtime.wire import COORDINATION_MESSAGE_BYTES, coordination_endpoint, replica_identity
from scheduler.lockstep.agreement import Agreement
from scheduler.ranks.epochs import common_rendezvous
from scheduler.sockets import InvalidMessages, bind_zmq

log = logging.getLogger("octavo.scheduler")

# States that a member does not read are worth nothing once there are newer ones.
_SEND_QUEUE = 64
_MAX_MESSAGES = 256
_INTERVAL_S = 1.0
# ZeroMQ reports a disconnect a little before it forgets the peer, so all are told again, to see who is there.
_PROBE_DELAYS_S = (0.0, 0.02, 0.2)


class Coordinator:
    """Hears of replicas, tells all what the agreement is: when it changes, and each second."""

    def __init__(
        self, context: zmq.Context, options: Options, curve_dir: Path | None, invalid: InvalidMessages
    ) -> None:
        """Raises AddressError or CurveError."""
        self.socket = bind_zmq(
            context,
            coordination_endpoint(options.step_address(0)),
            curve_dir,
            max_message_bytes=COORDINATION_MESSAGE_BYTES,
            queue=_SEND_QUEUE,
        )
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._agreement = Agreement(
            options,
            common_rendezvous(options),
            instance=secrets.randbits(63),
            # It grows over restarts, too.
            epoch=int(time.time() * 1000),
            heartbeat_timeout=options.heartbeat_timeout,
        )
        self._invalid = invalid
        # What all were told last.
        self._told = b""
        self._due = 0.0
        self._probe_times: list[float] = []

    def next_check(self, now: float) -> float:
        """When `serve` should be called next, if nothing arrives."""
        return min(self._due, *self._probe_times[:1], now + _INTERVAL_S)

    def serve(self, now: float) -> None:
        """Hears what has arrived, and tells what there is to tell."""
        for _ in range(_MAX_MESSAGES):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
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
        # Who is found to be gone may change it.
        while (state := self._agreement.group.SerializeToString()) != self._told:
            self._told = state
            self._tell_all(state)

    def close(self) -> None:
        self._agreement.close()
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)

    def _hear(self, frames: list[bytes], now: float) -> None:
        peer = frames[0]
        try:
            state = pb.ReplicaState.FromString(b"".join(frames[1:]))
        except DecodeError:
            self._invalid.note(peer, "bytes that are no ReplicaState")
            return
        if len(frames) != 2 or peer != replica_identity(state.replica, state.instance):
            self._invalid.note(peer, f"a ReplicaState of {len(frames) - 1} frames that says it is of another peer")
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
        """False if the peer is not there, or does not read."""
        try:
            self.socket.send_multipart([peer, message], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True
