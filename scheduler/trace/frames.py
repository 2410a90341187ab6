"""The frames of a trace file: length, checksum, record. What a crash has cut off, or a disk has changed, is noticed."""

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from scheduler.trace.errors import TraceError
from scheduler.trace.records import FORMAT_VERSION, AnyRecord, Call, Origin
from scheduler.trace.snapshot import Snapshot

_MARK = b"octavo trace "
FIRST_LINE = _MARK + b"%d\n" % FORMAT_VERSION
# Of the record's bytes: how many, a checksum of that number, and theirs. Without the first checksum a changed length
# would look like a file that was cut off.
_HEAD = struct.Struct("<IHI")
_LENGTH = struct.Struct("<I")

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyRecord)


def frame(record: AnyRecord) -> bytes:
    content = _encoder.encode(record)
    return _HEAD.pack(len(content), _check(len(content)), zlib.crc32(content)) + content


def _check(length: int) -> int:
    return zlib.crc32(_LENGTH.pack(length)) & 0xFFFF


class TraceFile:
    """Reads one file. Memory is bounded by its longest record, and that by the file's own size."""

    def __init__(self, path: Path) -> None:
        """Raises TraceError if it is no trace of this version, or ends before anything can be replayed."""
        self.path = path
        # Of a record that the end of the file has cut off: bytes that could not be used.
        self.num_torn_bytes = 0
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise TraceError(f"{path} can't be read: {error.strerror}") from None
        try:
            self.size = os.fstat(self._file.fileno()).st_size
            self._check_first_line()
            records = self._read()
            origin, snapshot = next(records, None), next(records, None)
            if not isinstance(origin, Origin) or not isinstance(snapshot, Snapshot):
                raise TraceError(
                    f"{path} ends before its first snapshot: the scheduler that wrote it had no workers yet, or was "
                    "killed in its first second"
                )
        except BaseException:
            self.close()
            raise
        self.origin, self.snapshot, self._records = origin, snapshot, records

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "TraceFile":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def position(self) -> int:
        """Bytes read so far."""
        return self._file.tell()

    def __iter__(self) -> Iterator[Call]:
        """The calls behind the snapshot, once. Raises TraceError where the file is damaged."""
        for record in self._records:
            if isinstance(record, Origin | Snapshot):
                raise TraceError(f"{self.path} is damaged: byte {self.position} is behind a second beginning")
            yield record

    def _check_first_line(self) -> None:
        line = self._file.readline(64)
        if line == FIRST_LINE:
            return
        if not self.size:
            raise TraceError(f"{self.path} is empty: the scheduler that made it had no workers yet")
        version = line[len(_MARK) :].strip()
        if line.startswith(_MARK) and version.isdigit():
            raise TraceError(
                f"{self.path} is a trace of format {int(version)}; this is Octavo with format {FORMAT_VERSION}: replay "
                "it with the version that wrote it"
            )
        raise TraceError(f"{self.path} is not a trace: its first line is not {FIRST_LINE.decode().strip()!r}")

    def _read(self) -> Iterator[AnyRecord]:
        while (start := self._file.tell()) < self.size:
            content = self._read_frame(start)
            if content is None:
                self.num_torn_bytes = self.size - start
                return
            try:
                yield _decoder.decode(content)
            except msgspec.DecodeError as error:
                raise TraceError(
                    f"{self.path}: the record at byte {start} is not one of format {FORMAT_VERSION}: {error}"
                ) from None

    def _read_frame(self, start: int) -> bytes | None:
        """None: the end of the file has cut it off."""
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
        raise TraceError(f"{self.path} is damaged: byte {start} of {self.size} begins a record that was changed")
