"""A batch's record, its states, and the claim of the router process that runs it."""

import contextlib
import errno
import fcntl
import os
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import msgspec

from router.api.gateway.batches.store import RECORD, UNFINISHED, BatchStore, StoredFile, remove_folder, write_whole
from router.batches.journal import sync_directory

Status = Literal["validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelled"]
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
_INPUT, _CANCEL = "input.jsonl", "cancel"
# What a process that was killed while it made a batch left is removed after this time.
_UNFINISHED_S = 60.0


class Fault(msgspec.Struct, omit_defaults=True):
    """Why a batch failed."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Record(msgspec.Struct, kw_only=True):
    """Only the process with the claim writes it. Times are in seconds since 1970."""

    id: str
    tenant: str
    # The key that made it, in hexadecimal digits; empty: the router has no keys.
    key_digest: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None
    # Files of the output, if there is any. They are named at the start, so that to finish twice is to finish once.
    answers_id: str
    problems_id: str
    status: Status = "validating"
    # The status after finalizing.
    ends_as: Status = "completed"
    # When it came to its states.
    times: dict[str, int] = {}
    num_lines: int = 0
    num_successes: int = 0
    num_failures: int = 0
    faults: list[Fault] = []
    # Passes that have ended unexpectedly since a line was last computed.
    num_failed_passes: int = 0

    @property
    def key(self) -> str:
        """The part of the id that names the batch in ids of lines."""
        return self.id.removeprefix("batch_")

    def become(self, status: Status) -> None:
        self.status = status
        self.times = {**self.times, status: int(time.time())}


class Batch:
    """A batch's folder. Its methods are for threads; they raise OSError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def input(self) -> Path:
        return self.folder / _INPUT

    @property
    def answers(self) -> Path:
        """The output of requests that succeeded, until the batch ends."""
        return self.folder / "answers.part"

    @property
    def problems(self) -> Path:
        """The output of other lines, until the batch ends."""
        return self.folder / "problems.part"

    def create(self, record: Record, content: Path) -> None:
        """Leaves nothing if it fails. content: of the input file, which may be deleted while the batch runs."""
        try:
            self.folder.mkdir(mode=0o700, parents=True)
            os.link(content, self.input)
            self.write(record)
        except BaseException:
            self.remove()
            raise

    def read(self) -> Record | None:
        try:
            return msgspec.json.decode((self.folder / RECORD).read_bytes(), type=Record)
        except FileNotFoundError:
            return None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            # Damaged, or of another version: not ours to remove.
            raise OSError(errno.EIO, f"the record of {self.folder.name} can't be read: {error}") from None

    def write(self, record: Record) -> None:
        write_whole(self.folder / RECORD, msgspec.json.encode(record))

    def why_over(self, record: Record) -> Literal["cancelled", "expired"] | None:
        """Tells why no more lines are computed; None: they are."""
        if self.cancelled_at is not None:
            return "cancelled"
        return "expired" if time.time() >= record.expires_at else None

    def cancel(self) -> None:
        """Asks the process that runs it to end it."""
        (self.folder / _CANCEL).touch(mode=0o600)

    @property
    def cancelled_at(self) -> int | None:
        try:
            return int((self.folder / _CANCEL).stat().st_mtime)
        except FileNotFoundError:
            return None

    def tidy(self) -> None:
        """Leaves the record alone, once the batch has ended."""
        for path in (self.input, self.answers, self.problems):
            path.unlink(missing_ok=True)

    def remove(self) -> None:
        remove_folder(self.folder)

    def shown(self, record: Record, has_answers: bool, has_problems: bool) -> dict[str, Any]:
        """Returns the batch as the API shows it. has_answers, has_problems: their files are there."""
        times, status = record.times, str(record.status)
        cancelled_at = self.cancelled_at
        if cancelled_at is not None and record.status not in ENDED:
            status = "cancelling"
        faults = [msgspec.to_builtins(each) for each in record.faults]
        return {
            "id": record.id,
            "object": "batch",
            "endpoint": record.endpoint,
            "errors": {"object": "list", "data": faults} if faults else None,
            "input_file_id": record.input_file_id,
            "completion_window": record.completion_window,
            "status": status,
            "output_file_id": record.answers_id if has_answers else None,
            "error_file_id": record.problems_id if has_problems else None,
            "created_at": record.created_at,
            "in_progress_at": times.get("in_progress"),
            "expires_at": record.expires_at,
            "finalizing_at": times.get("finalizing"),
            "completed_at": times.get("completed"),
            "failed_at": times.get("failed"),
            "expired_at": times.get("expired"),
            "cancelling_at": cancelled_at,
            "cancelled_at": times.get("cancelled"),
            "request_counts": {
                "total": record.num_lines,
                "completed": record.num_successes,
                "failed": record.num_failures,
            },
            "metadata": record.metadata,
        }


def shown_file(file: StoredFile) -> dict[str, Any]:
    """Returns a file as the API shows it."""
    return {"object": "file", "status": "processed", "status_details": None, **msgspec.to_builtins(file)}


def create(store: BatchStore, batch: Batch, record: Record, content: Path) -> None:
    """Makes a batch and puts it into the queue, or leaves nothing. For threads. Raises OSError."""
    # In the queue first: what a kill leaves in between is found there, and removed.
    claim = Claim.make(store.entry_of(batch.folder))
    try:
        batch.create(record, content)
    except BaseException:
        # Otherwise the folder is found by its entry, too.
        if not batch.folder.exists():
            claim.end()
        raise
    finally:
        claim.release()


class Claim:
    """The right to run a batch: the lock on its entry in the queue, which ends with its process."""

    def __init__(self, entry: Path, file: int) -> None:
        self._entry, self._file = entry, file

    @classmethod
    def make(cls, entry: Path) -> "Claim":
        """Puts a batch into the queue, and keeps others from running it. Raises OSError."""
        # Locked before it has its name: nobody else can have it first.
        file, name = tempfile.mkstemp(prefix=UNFINISHED, dir=entry.parent.parent)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.replace(name, entry)
            sync_directory(entry.parent)
        except BaseException:
            for path in (entry, Path(name)):
                path.unlink(missing_ok=True)
            os.close(file)
            raise
        return cls(entry, file)

    @classmethod
    def take(cls, entry: Path) -> "Claim | None":
        """Returns None if another process has it, or the batch has ended. Raises OSError."""
        try:
            file = os.open(entry, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return None
        return cls(entry, file)

    def put_back(self) -> None:
        """Makes its batch the last in the queue."""
        with contextlib.suppress(OSError):
            os.utime(self._file)

    @property
    def is_stale(self) -> bool:
        """Its batch should have a record by now."""
        return time.time() - os.fstat(self._file).st_mtime > _UNFINISHED_S

    def end(self) -> None:
        """Takes the batch out of the queue."""
        self._entry.unlink(missing_ok=True)

    def release(self) -> None:
        os.close(self._file)
