"""Writes a trace: FILE, and FILE.1 with what came before it."""

import errno
import logging
import os
import secrets
import stat
import time
from pathlib import Path

from runtime.version import octavo_version
from scheduler.trace.errors import TraceError
from scheduler.trace.frames import FIRST_LINE, frame
from scheduler.trace.records import AnyRecord, Origin
from scheduler.trace.snapshot import Snapshot

log = logging.getLogger("octavo.scheduler")

_BUFFER_BYTES = 1 << 16


def trace_path(option: str, replica: int) -> Path:
    """Of each scheduler its own: the replica's number is put before the suffix."""
    path = Path(option)
    return path.with_name(f"{path.stem}.{replica}{path.suffix}")


class TraceWriter:
    """Buffers what it is given; `flush` is to be called each second.

    A disk that is full, or gone, ends the trace with a warning, never the serving.
    """

    def __init__(self, path: Path, max_bytes: int, replica: int) -> None:
        """Makes an empty FILE, readable by its owner only; what there was of that name is kept as FILE.1.

        Raises TraceError.
        """
        self._path, self._max_bytes, self._replica = path, max_bytes, replica
        self._run, self._number = secrets.token_hex(8), 0
        self._buffer = bytearray()
        # Of this file, what is buffered included; and of that, the snapshot and all before it.
        self._size = self._size_of_start = 0
        # None: it has been given up, or closed.
        self._fd: int | None = None
        try:
            self._begin_file()
        except OSError as error:
            raise TraceError(
                f"trace: {path} can't be written ({error.strerror}): name a file in a directory that exists and that "
                "the scheduler may write to"
            ) from None

    @property
    def is_full(self) -> bool:
        """A new file should begin. The snapshot alone never fills one: each has room for as much again."""
        return self._fd is not None and self._size >= max(self._max_bytes, 2 * self._size_of_start)

    def begin(self, snapshot: Snapshot) -> None:
        """To be called before anything is appended, and again when it is full: a new file begins with the snapshot."""
        if self._fd is None:
            return
        if self._number:
            self.flush()
            try:
                self._begin_file()
            except OSError as error:
                self._give_up(error)
                return
        self._number += 1
        self._size = len(FIRST_LINE)
        self._buffer += FIRST_LINE
        origin = Origin(
            octavo_version=octavo_version(),
            replica=self._replica,
            run=self._run,
            number=self._number,
            unix_time=time.time(),
        )
        self.append(origin)
        self.append(snapshot)
        self._size_of_start = self._size
        self.flush()

    def append(self, record: AnyRecord) -> None:
        if self._fd is None:
            return
        content = frame(record)
        self._buffer += content
        self._size += len(content)
        if len(self._buffer) >= _BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Gives the operating system what is buffered: it outlives the process then, though not the machine."""
        try:
            while self._buffer and self._fd is not None:
                del self._buffer[: os.write(self._fd, self._buffer)]
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        self.flush()
        self._close_file()

    def _begin_file(self) -> None:
        self._close_file()
        self._put_aside()
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def _put_aside(self) -> None:
        try:
            found = os.lstat(self._path)
        except FileNotFoundError:
            return
        if not stat.S_ISREG(found.st_mode):
            raise FileExistsError(errno.EEXIST, "something that is no file has this name")
        if found.st_size:
            os.replace(self._path, f"{self._path}.1")
        else:
            # Of one that never had workers: not worth what FILE.1 holds.
            self._path.unlink()

    def _close_file(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _give_up(self, error: OSError) -> None:
        log.warning("the trace ends here: %s can't be written (%s)", self._path, error.strerror)
        self._buffer.clear()
        self._close_file()
