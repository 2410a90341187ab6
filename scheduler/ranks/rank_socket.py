"""The socket of a replica's ranks, which says at once if a rank can't take a message."""

from pathlib import Path

import zmq
from zmq.utils.monitor import parse_monitor_message

from protos import step_pb2
from runtime.wire import STEP_MESSAGE_BYTES
from runtime.zmq_frames import Frames
from scheduler.sockets import bind_zmq, close_monitored

# Messages that may wait for a rank that does not read: more than there ever are (max_steps_in_flight is at most 64, and
# few items are sent at a time), so a full queue means that the rank has a problem.
_SEND_QUEUE = 128
_SHUTDOWN_LINGER_MS = 1000
_MONITORED = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class RankSocket:
    """A ROUTER socket that reports peers that are gone or do not read. For one thread."""

    def __init__(self, context: zmq.Context, endpoint: str, curve_dir: Path | None, *, timeout: float) -> None:
        """timeout: seconds of silence after which a tcp connection is closed. Raises AddressError or CurveError."""
        self.socket = bind_zmq(
            context,
            endpoint,
            curve_dir,
            max_message_bytes=STEP_MESSAGE_BYTES,
            queue=_SEND_QUEUE,
            timeout=timeout,
        )
        self._frames = Frames(self.socket)
        self.monitor = self.socket.get_monitor_socket(_MONITORED)

    def receive(self) -> list[bytes] | None:
        """Returns the next message, starting with the peer's identity; None if there is none yet."""
        return self._frames.receive()

    def next_connection_event(self) -> int | None:
        """Returns the next event, such as zmq.EVENT_DISCONNECTED; None if there is none yet."""
        try:
            return parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))["event"]
        except zmq.Again:
            return None

    def send(self, identity: bytes, message: step_pb2.SchedulerToWorker) -> bool:
        """Sends a message. False if the peer is gone or does not read."""
        return not self.send_frame(identity, message.SerializeToString())

    def send_frame(self, identity: bytes, frame: bytes) -> str:
        """Sends a frame. Returns an empty string, or the reason why the peer can't take it."""
        try:
            self.socket.send_multipart([identity, frame], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return str(error.strerror)
            raise
        return ""

    def is_reachable(self, identity: bytes) -> bool:
        """True if a peer with this identity is connected, found by sending it a probe (ROUTER_MANDATORY)."""
        return self.send(identity, step_pb2.SchedulerToWorker(probe=step_pb2.Probe()))

    def shut_down(self, identity: bytes, reason: str, *, permanent: bool) -> None:
        """Tells a rank to end. reason: empty for an orderly end."""
        self.send(identity, step_pb2.SchedulerToWorker(shutdown=step_pb2.Shutdown(reason=reason, permanent=permanent)))

    def close(self) -> None:
        """Closes the socket; the last messages get up to a second to leave."""
        close_monitored(self.socket, self.monitor, linger=_SHUTDOWN_LINGER_MS)
