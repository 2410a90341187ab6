"""A file of whole lines that grows and outlives a kill of its writer at any moment."""

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from router.batches.answers import OtherOutputError, could_begin, read_back


class JournalError(Exception):
    """A journal can't be used or written; the message names the file, and says what would work."""


class Journal:
    """Appends lines and syncs them to the disk; knows which lines of the input it has.

    Only one process at a time has it: a lock ends with its process.
    """

    def __init__(self, path: Path, key: str) -> None:
        """key: the batch's. Cuts off what a killed writer has not finished. Raises JournalError."""
        self.path = path
        # Numbers of the lines that succeeded, and of all that are there: a byte for each line of the input.
        self.num_successes = self.num_lines = 0
        self._has = bytearray()
        self._pending: list[bytes] = []
        self._num_asked = self._num_kept = 0
        self._turn = asyncio.Lock()
        # Why a write has failed: lines that waited with it are not on the disk, either.
        self._broken: JournalError | None = None
        self._thread = ThreadPoolExecutor(1, "journal")
        try:
            self._file = _locked(path)
        except OSError as error:
            raise self._failure(error) from error
        try:
            self.size = self._recover(key)
            os.ftruncate(self._file, self.size)
        except OSError as error:
            os.close(self._file)
            raise self._failure(error) from error
        except OtherOutputError as error:
            os.close(self._file)
            raise JournalError(f"{str(path)!r}: {error}; remove the file, or name another output") from None
        except BaseException:
            os.close(self._file)
            raise

    def __contains__(self, number: int) -> bool:
        return number < len(self._has) and bool(self._has[number])

    async def append(self, line: bytes, number: int, *, is_success: bool) -> None:
        """Returns once the line is on the disk. Lines that wait for it go there together. Raises JournalError."""
        self._pending.append(line)
        self._num_asked += 1
        place = self._num_asked
        async with self._turn:
            if self._broken is not None:
                raise self._broken
            if self._num_kept < place:
                lines, self._pending = self._pending, []
                await asyncio.get_running_loop().run_in_executor(self._thread, self._write, lines)
                self._num_kept += len(lines)
        self._note(number, is_success)

    async def close(self) -> None:
        """Waits for the write that is under way."""
        await asyncio.to_thread(self._thread.shutdown)
        os.close(self._file)

    def publish(self, path: Path) -> None:
        """Gives the file its final name, in one step. Raises JournalError."""
        try:
            os.fsync(self._file)
            os.replace(self.path, path)
            sync_directory(path.parent)
        except OSError as error:
            raise self._failure(error) from None

    def _note(self, number: int, is_success: bool) -> None:
        if number >= len(self._has):
            self._has.extend(bytes(max(number + 1 - len(self._has), len(self._has), 1024)))
        if not self._has[number]:
            self._has[number] = 1
            self.num_lines += 1
            self.num_successes += is_success

    def _recover(self, key: str) -> int:
        """Reads what is there. Returns the size of the whole lines."""
        size = 0
        with os.fdopen(os.dup(self._file), "rb") as file:
            file.seek(0)
            for line in file:
                if not size and not could_begin(line):
                    raise OtherOutputError("it is not the output of a batch")
                if not line.endswith(b"\n"):
                    break
                try:
                    number, is_success = read_back(key, line)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    # A machine that failed may leave more than one torn line.
                    break
                self._note(number, is_success)
                size += len(line)
        return size

    def _write(self, lines: Sequence[bytes]) -> None:
        data = memoryview(b"".join(lines))
        num_bytes, done = len(data), 0
        try:
            while done < num_bytes:
                done += os.write(self._file, data[done:])
            os.fsync(self._file)
        except OSError as error:
            self._broken = self._failure(error)
            # A full disk may take a part of it. If this fails, too, the next one to open the file cuts that off.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self.size)
            raise self._broken from error
        self.size += num_bytes

    def _failure(self, error: OSError) -> JournalError:
        return JournalError(f"{str(self.path)!r}: {error.strerror or error}")


def counts_of(path: Path, key: str) -> tuple[int, int]:
    """Returns how many lines a published file has, and how many of them are of requests that succeeded.

    Raises JournalError if another batch, or something else, wrote it.
    """
    num_lines = num_successes = 0
    try:
        with path.open("rb") as file:
            for line in file:
                num_lines += 1
                num_successes += read_back(key, line)[1]
    except OSError as error:
        raise JournalError(f"{str(path)!r}: {error.strerror or error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OtherOutputError):
        raise JournalError(
            f"{str(path)!r} is there already, and is not the output of this batch: remove it, or name another output"
        ) from None
    return num_lines, num_successes


def _locked(path: Path) -> int:
    """Opens a file and locks it for as long as it stays open. Raises OSError."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found, named = os.fstat(file), path.stat()
        except FileNotFoundError:
            os.close(file)
            continue
        except BlockingIOError:
            os.close(file)
            raise BlockingIOError(None, "another process writes it: wait for its end, or name another output") from None
        except BaseException:
            os.close(file)
            raise
        # Its last writer may have given it its final name since it was opened.
        if (found.st_dev, found.st_ino) == (named.st_dev, named.st_ino):
            return file
        os.close(file)


def sync_directory(path: Path) -> None:
    """Makes renames and removals in a directory outlive a failure of the machine."""
    file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
