"""Writes log lines on a thread of its own, so that no other thread waits until they are read.

A pipe takes 64 KiB. If its reader is stopped (Ctrl-S, Ctrl-Z, a dead ssh), the next write waits. Here only the writer
does. Lines queue up to a bound; those beyond it are dropped and counted.

The standard library's QueueListener does not fit: its queue counts records instead of bytes, and its `stop` waits
without a bound, or fails if the queue is full.
"""

import os
import select
import threading
from collections import deque
from collections.abc import Callable

_BATCH_BYTES = 32 * 1024


class LogWriter:
    """A bounded queue of lines, and the thread that writes them to a file descriptor in order."""

    def __init__(self, descriptor: int, max_bytes: int, missing: Callable[[int], str]) -> None:
        """missing: makes the line, with its end, that stands where so many lines are missing."""
        self._descriptor, self._max_bytes, self._missing = descriptor, max_bytes, missing
        self.num_dropped = 0
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        """Starts with an empty queue; in a forked child, whose parent writes what it had queued."""
        # Its lock is reentrant: a finalizer that logs may run in the middle of `put`.
        self._changed = threading.Condition()
        # Each with the number of missing lines that it reports: 0 for a line that was put.
        self._lines: deque[tuple[bytes, int]] = deque()
        self._num_bytes = 0
        # Dropped since the last line that says so.
        self._num_missing = 0
        self._is_writing = False
        # The last write failed. Lines go on being tried, but the news of missing ones waits for the next line.
        self._has_failed = False
        self._thread: threading.Thread | None = None

    def put(self, line: str) -> None:
        """Queues a line with its end, or drops it if the queue is full. Never waits."""
        data = line.encode(errors="backslashreplace")
        with self._changed:
            if self._num_bytes + len(data) > self._max_bytes:
                self.num_dropped += 1
                self._num_missing += 1
                return
            self._report_missing()
            self._append(data)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="log", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self, seconds: float) -> bool:
        """Waits until all lines are written; at most so long. True if they are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._lines and not self._is_writing, seconds)

    def _append(self, data: bytes, num_reported: int = 0) -> None:
        self._lines.append((data, num_reported))
        self._num_bytes += len(data)

    def _report_missing(self) -> None:
        if self._num_missing:
            number, self._num_missing = self._num_missing, 0
            self._append(self._missing(number).encode(errors="backslashreplace"), number)

    def _run(self) -> None:
        while True:
            batch, num_lines, num_reported = self._take()
            is_written = self._write(batch)
            with self._changed:
                self._is_writing, self._has_failed = False, not is_written
                if not is_written:
                    self.num_dropped += num_lines
                    # A report that was not written is made again; it is not a line that is missing.
                    self._num_missing += num_lines + num_reported
                self._changed.notify_all()

    def _take(self) -> tuple[bytes, int, int]:
        """Waits for lines, and takes the first ones from the queue. Returns them, their number without reports, and how
        many lines these report."""
        with self._changed:
            while not self._lines:
                if self._num_missing and not self._has_failed:
                    self._report_missing()
                else:
                    self._changed.wait()
            batch, size, num_lines, num_reported = list[bytes](), 0, 0, 0
            while self._lines and (not batch or size + len(self._lines[0][0]) <= _BATCH_BYTES):
                data, number = self._lines.popleft()
                batch.append(data)
                size += len(data)
                num_lines += number == 0
                num_reported += number
            self._num_bytes -= size
            self._is_writing = True
            return b"".join(batch), num_lines, num_reported

    def _write(self, data: bytes) -> bool:
        """Writes all, however long that takes. False if the descriptor refuses it: closed, or a full disk.

        Not through sys.stderr, whose lock would keep the interpreter from ending.
        """
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:
                select.select([], [self._descriptor], [])
            except OSError:
                return False
        return True
