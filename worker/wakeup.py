"""Lets signals and other threads end the wait of a thread that polls sockets."""

import signal
import socket
import threading


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
