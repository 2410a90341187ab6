"""The scheduler's end of the step wire: who is there, and what is sent to whom."""

from pathlib import Path

import zmq
from zmq.utils.monitor import parse_monitor_message

from protos import step_pb2
from runtime.wire import STEP_MESSAGE_BYTES
from scheduler.addresses import bind_zmq

# Plans that may wait for a rank that does not read: more than are ever in flight (max_steps_in_flight is 64 at most),
# so that a full queue means trouble.
_SEND_QUEUE = 128
_SHUTDOWN_LINGER_MS = 1000
_MONITORED = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class RankSocket:
    """A ROUTER that says when a peer is not there, or does not read. For one thread."""

    def __init__(self, context: zmq.Context, endpoint: str, curve_dir: Path | None) -> None:
        """Raises AddressError or CurveError."""
        self.socket = bind_zmq(context, endpoint, curve_dir, max_message_bytes=STEP_MESSAGE_BYTES, queue=_SEND_QUEUE)
        self.monitor = self.socket.get_monitor_socket(_MONITORED)

    def receive(self) -> list[bytes] | None:
        """The next message, the peer's identity first; None if there is none yet."""
        try:
            return self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def next_connection_event(self) -> int | None:
        """zmq.EVENT_DISCONNECTED and its kin; None if there is none."""
        try:
            return parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))["event"]
        except zmq.Again:
            return None

    def send(self, identity: bytes, message: step_pb2.SchedulerToWorker) -> bool:
        """False if the peer is not there, or does not read."""
        return not self.send_frame(identity, message.SerializeToString())

    def send_frame(self, identity: bytes, frame: bytes) -> str:
        """Empty if it is sent; else why the peer does not take it."""
        try:
            self.socket.send_multipart([identity, frame], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return str(error.strerror)
            raise
        return ""

    def is_reachable(self, identity: bytes) -> bool:
        """ROUTER_MANDATORY tells who is there."""
        return self.send(identity, step_pb2.SchedulerToWorker(probe=step_pb2.Probe()))

    def shut_down(self, identity: bytes, reason: str, *, permanent: bool) -> None:
        """Sends a rank home. reason: empty for an orderly end."""
        self.send(identity, step_pb2.SchedulerToWorker(shutdown=step_pb2.Shutdown(reason=reason, permanent=permanent)))

    def close(self) -> None:
        """What was sent last gets a moment to leave."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=_SHUTDOWN_LINGER_MS)
