"""The worker's sockets: the DEALER of the step wire, and a wakeup that ends a wait on it."""

import secrets
import signal
import socket
import threading
from pathlib import Path

import zmq

from protos import step_pb2
from runtime.security.curve import client_curve
from runtime.wire import STEP_MESSAGE_BYTES, rank_identity
from runtime.zmq_frames import Frames
from runtime.zmq_silence import end_silent_connections


class Wakeup:
    """A socket that becomes readable to wake the main loop, and a flag that the process was asked to stop."""

    def __init__(self) -> None:
        self.reader, self._writer = socket.socketpair()
        self.reader.setblocking(False)
        self._writer.setblocking(False)
        self._stop = threading.Event()

    @property
    def stop_requested(self) -> bool:
        return self._stop.is_set()

    def notify(self) -> None:
        """Ends the poll. May be called on any thread."""
        try:
            self._writer.send(b"x")
        except BlockingIOError:
            pass  # the buffer is full of notifications, so the poll ends anyway

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
        """Makes SIGTERM and SIGINT request a stop. Must be called on the main thread."""
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda _number, _frame: self._stop.set())


# How long the process waits at its end for its last message (Failure) to be sent.
_LAST_WORD_MS = 1000


class Link:
    """The connection to the scheduler, which need not be running yet. Use it on one thread only."""

    def __init__(self, context: zmq.Context, endpoint: str, curve_dir: Path | None, *, timeout: float) -> None:
        """curve_dir: directory of the CURVE keys; None: no encryption. timeout: seconds of silence after which a tcp
        connection is closed. Raises CurveError."""
        self._context, self._endpoint, self._curve_dir, self._timeout = context, endpoint, curve_dir, timeout
        self._connect(b"join-" + secrets.token_hex(8).encode())

    def join(self) -> None:
        """Reconnects under a random identity, to send Hello."""
        self._replace(b"join-" + secrets.token_hex(8).encode())

    def enter(self, epoch: int, rank: int) -> None:
        """Reconnects as a rank of an epoch."""
        self._replace(rank_identity(epoch, rank))

    def was_cut(self) -> bool:
        """Returns whether a connection has ended since the last call. ZeroMQ connects again by itself, but messages may
        be lost."""
        was_cut = False
        while self.cuts.poll(0):
            self.cuts.recv_multipart()
            was_cut = True
        return was_cut

    def receive(self) -> list[bytes] | None:
        """Returns the frames of the next message, or None if there is none yet."""
        return self._frames.receive()

    def send(self, message: step_pb2.WorkerToScheduler) -> bool:
        """Queues a message. Returns False if the queue is full because no scheduler reads it."""
        try:
            self.socket.send(message.SerializeToString(), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self, *, deliver: bool = False) -> None:
        """Closes the socket. deliver: waits up to a second for queued messages to be sent."""
        self._close(linger=_LAST_WORD_MS if deliver else 0)

    def _replace(self, identity: bytes) -> None:
        self._close(linger=0)
        self._connect(identity)

    def _connect(self, identity: bytes) -> None:
        self.socket = make_dealer(self._context, self._endpoint, self._curve_dir, identity, timeout=self._timeout)
        self._frames = Frames(self.socket)
        # Readable once a connection has ended.
        self.cuts = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.socket.connect(self._endpoint)

    def _close(self, linger: int) -> None:
        self.socket.disable_monitor()
        self.cuts.close(linger=0)
        self.socket.close(linger=linger)


def make_dealer(
    context: zmq.Context, endpoint: str, curve_dir: Path | None, identity: bytes, *, timeout: float
) -> zmq.Socket:
    """Returns a DEALER that, once told to connect, keeps trying until it is closed. timeout: seconds of silence after
    which it connects anew, over tcp. Raises CurveError."""
    socket: zmq.Socket = context.socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, STEP_MESSAGE_BYTES)
        # In ms. Short at first: a scheduler that starts together with its workers listens within moments. The maximum
        # is low, too: streams wait for a restarted scheduler, and an attempt costs microseconds.
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2_000)
        end_silent_connections(socket, endpoint, timeout)
        if endpoint.startswith("tcp://") and curve_dir is not None:
            client_curve(socket, curve_dir)
    except BaseException:
        socket.close(linger=0)
        raise
    return socket
