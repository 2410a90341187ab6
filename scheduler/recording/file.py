"""Recording files: writes and reads checksummed frames, and detects records cut off by a crash or changed by a disk.

The writer keeps two files: FILE, and FILE.1 with the records before it.
"""

import errno
import logging
import os
import secrets
import stat
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from runtime.wire import octavo_version
from scheduler.core.saved import Snapshot
from scheduler.recording.records import (
    FIRST_VERSION_WITH_TODAYS_DRAFTS,
    FORMAT_VERSION,
    READABLE_VERSIONS,
    AnyRecord,
    Call,
    Origin,
    RecordingError,
)

_MARK = b"octavo trace "
FIRST_LINE = _MARK + b"%d\n" % FORMAT_VERSION
_FIRST_LINES = {_MARK + b"%d\n" % version: version for version in READABLE_VERSIONS}
# The record's length in bytes, a checksum of that length, and a checksum of the record. Without the first checksum, a
# changed length would look like a file that was cut off.
_HEAD = struct.Struct("<IHI")
_LENGTH = struct.Struct("<I")

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyRecord)


def frame(record: AnyRecord) -> bytes:
    content = _encoder.encode(record)
    return _HEAD.pack(len(content), _check(len(content)), zlib.crc32(content)) + content


def _check(length: int) -> int:
    return zlib.crc32(_LENGTH.pack(length)) & 0xFFFF


class RecordingFile:
    """Reads one file. Its longest record bounds the memory, and the file's size bounds the record."""

    def __init__(self, path: Path) -> None:
        """Raises RecordingError if it is not a recording of this version, or ends before anything can be replayed."""
        self.path = path
        # Bytes of an incomplete record at the end of the file, which can't be used.
        self.num_torn_bytes = 0
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise RecordingError(f"{path} can't be read: {error.strerror}") from None
        try:
            self.size = os.fstat(self._file.fileno()).st_size
            version = self._check_first_line()
            records = self._read()
            origin, snapshot = next(records, None), next(records, None)
            if not isinstance(origin, Origin) or not isinstance(snapshot, Snapshot):
                raise RecordingError(
                    f"{path} ends before its first snapshot: the scheduler that wrote it had no workers yet, or was "
                    "killed in its first second"
                )
            if version < FIRST_VERSION_WITH_TODAYS_DRAFTS and snapshot.settings.speculation is not None:
                raise RecordingError(
                    f"{path} is a trace of format {version} with speculative_config: how drafts are chosen has changed "
                    "since, so replay it with the version that wrote it"
                )
        except BaseException:
            self.close()
            raise
        self.origin, self.snapshot, self._records = origin, snapshot, records

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "RecordingFile":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def position(self) -> int:
        """Bytes read so far."""
        return self._file.tell()

    def __iter__(self) -> Iterator[Call]:
        """Yields the calls after the snapshot, once. Raises RecordingError where the file is damaged."""
        for record in self._records:
            if isinstance(record, Origin | Snapshot):
                raise RecordingError(f"{self.path} is damaged: a second beginning ends at byte {self.position}")
            yield record

    def _check_first_line(self) -> int:
        """Returns the version of the format. Raises RecordingError."""
        line = self._file.readline(64)
        if (known := _FIRST_LINES.get(line)) is not None:
            return known
        if not self.size:
            raise RecordingError(f"{self.path} is empty: the scheduler that made it had no workers yet")
        version = line[len(_MARK) :].strip()
        if line.startswith(_MARK) and version.isdigit():
            raise RecordingError(
                f"{self.path} is a trace of format {int(version)}; this is Octavo with format {FORMAT_VERSION}: replay "
                "it with the version that wrote it"
            )
        raise RecordingError(f"{self.path} is not a trace: its first line is not {FIRST_LINE.decode().strip()!r}")

    def _read(self) -> Iterator[AnyRecord]:
        while (start := self._file.tell()) < self.size:
            content = self._read_frame(start)
            if content is None:
                self.num_torn_bytes = self.size - start
                return
            try:
                yield _decoder.decode(content)
            except msgspec.DecodeError as error:
                raise RecordingError(
                    f"{self.path}: the record at byte {start} is not one of format {FORMAT_VERSION}: {error}"
                ) from None

    def _read_frame(self, start: int) -> bytes | None:
        """Returns the content of a frame; None if the end of the file cuts it off."""
        head = self._file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            return None
        length, check, checksum = _HEAD.unpack(head)
        if check == _check(length):
            if length > self.size - self._file.tell():
                return None
            content = self._file.read(length)
            if zlib.crc32(content) == checksum:
                return content
        raise RecordingError(f"{self.path} is damaged: the record at byte {start} of {self.size} was changed")


log = logging.getLogger("octavo.scheduler")

_BUFFER_BYTES = 1 << 16


def recording_path(option: str, replica: int) -> Path:
    """The file of one scheduler: the option with the replica's number before the suffix."""
    path = Path(option)
    return path.with_name(f"{path.stem}.{replica}{path.suffix}")


class RecordingWriter:
    """Writes records with a buffer; call `flush` each second.

    A disk that is full or gone ends the recording with a warning; serving goes on.
    """

    def __init__(self, path: Path, max_bytes: int, replica: int) -> None:
        """Makes an empty FILE, readable only by its owner; a file that already has this name is kept as FILE.1.

        Raises RecordingError.
        """
        self._path, self._max_bytes, self._replica = path, max_bytes, replica
        self._run, self._number = secrets.token_hex(8), 0
        self._buffer = bytearray()
        # Bytes of this file including the buffer, and the bytes up to the end of its snapshot.
        self._size = self._size_of_start = 0
        # None once it is closed or given up.
        self._fd: int | None = None
        try:
            self._begin_file()
        except OSError as error:
            raise RecordingError(
                f"trace: {path} can't be written ({error.strerror}): give a file in a directory that exists and that "
                "the scheduler may write to"
            ) from None

    @property
    def is_full(self) -> bool:
        """True if a new file should begin. A file has room for at least as many bytes of calls as its snapshot has."""
        return self._fd is not None and self._size >= max(self._max_bytes, 2 * self._size_of_start)

    def begin(self, snapshot: Snapshot) -> None:
        """Begins a file with a snapshot. Call it before the first `append`, and again when the file is full."""
        if self._fd is None:
            return
        if self._number:
            self.flush()
            if self._fd is None:
                return  # given up
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
        """Hands the buffer to the operating system, so that a crash of the process loses nothing."""
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
            raise FileExistsError(errno.EEXIST, "something that is not a file has this name")
        if found.st_size:
            os.replace(self._path, f"{self._path}.1")
        else:
            # An empty file of a scheduler that never had workers is not worth losing the old FILE.1.
            self._path.unlink()

    def _close_file(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _give_up(self, error: OSError) -> None:
        log.warning("the trace ends here: %s can't be written (%s)", self._path, error.strerror)
        self._buffer.clear()
        self._close_file()
