"""The worker's sockets: the DEALER of the step wire, and what ends a wait on it."""

import secrets
import signal
import socket
import threading
from pathlib import Path

import zmq

from protos import step_pb2
from runtime.security.curve import client_curve
from runtime.wire import STEP_MESSAGE_BYTES, rank_identity


class Wakeup:
    """A file descriptor that becomes readable, and whether the process has been asked to stop."""

    def __init__(self) -> None:
        self.reader, self._writer = socket.socketpair()
        self.reader.setblocking(False)
        self._writer.setblocking(False)
        self._stop = threading.Event()

    @property
    def stop_requested(self) -> bool:
        return self._stop.is_set()

    def notify(self) -> None:
        """Ends the poll. From any thread."""
        try:
            self._writer.send(b"x")
        except BlockingIOError:
            pass  # the buffer is full of notifications: the poll ends as it is

    def request_stop(self) -> None:
        self._stop.set()
        self.notify()

    def drain(self) -> None:
        try:
            while self.reader.recv(4096):
                pass
        except BlockingIOError:
            return

    def close(self) -> None:
        self.reader.close()
        self._writer.close()

    def stop_on_signals(self) -> None:
        """SIGTERM and SIGINT ask to stop. On the main thread only."""
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda _number, _frame: self._stop.set())


# How long a last word (Failure) may take to leave when the process ends.
_LAST_WORD_MS = 1000


class Link:
    """Connects to a scheduler that need not be there yet. To be used on one thread."""

    def __init__(self, context: zmq.Context, endpoint: str, curve_dir: Path | None) -> None:
        """curve_dir: where the CURVE keys are; None speaks in the clear. Raises CurveError."""
        self._context, self._endpoint, self._curve_dir = context, endpoint, curve_dir
        self.socket = self._connect(b"join-" + secrets.token_hex(8).encode())

    def join(self) -> None:
        """Connects anew, under a random identity, to say Hello."""
        self._replace(b"join-" + secrets.token_hex(8).encode())

    def enter(self, epoch: int, rank: int) -> None:
        """Connects anew as a rank of an epoch."""
        self._replace(rank_identity(epoch, rank))

    def receive(self) -> list[bytes] | None:
        """The frames of the next message; None if there is none yet."""
        try:
            return self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def send(self, message: step_pb2.WorkerToScheduler) -> bool:
        """Queues a message. False if the queue is full, for want of a scheduler that reads it."""
        try:
            self.socket.send(message.SerializeToString(), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self, *, deliver: bool = False) -> None:
        """deliver: gives what was sent last a second to leave."""
        self.socket.close(linger=_LAST_WORD_MS if deliver else 0)

    def _replace(self, identity: bytes) -> None:
        self.socket.close(linger=0)
        self.socket = self._connect(identity)

    def _connect(self, identity: bytes) -> zmq.Socket:
        return connect_dealer(self._context, self._endpoint, self._curve_dir, identity)


def connect_dealer(context: zmq.Context, endpoint: str, curve_dir: Path | None, identity: bytes) -> zmq.Socket:
    """A DEALER that goes on trying to connect for as long as it lives. Raises CurveError."""
    socket: zmq.Socket = context.socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, STEP_MESSAGE_BYTES)
        # Soon at first: a scheduler that starts along with its workers is there within moments. Streams wait for one
        # that was restarted, and an attempt costs microseconds, so the pauses do not grow long.
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2_000)
        if endpoint.startswith("tcp://") and curve_dir is not None:
            client_curve(socket, curve_dir)
        socket.connect(endpoint)
    except BaseException:
        socket.close(linger=0)
        raise
    return socket
