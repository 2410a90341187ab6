"""The file in which `octavo up` tells routers of replicas that it has stopped for a while, because they fail again and
again. It lies in the runtime directory; without `octavo up` there is none."""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

FILE_NAME = "quarantine.json"
# An `octavo up` that lives has tried the replica again by then.
_STALE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineNote:
    """One replica's. count: times that it was stopped. until: when it is tried again, in seconds of time.time(); 0: it
    is not stopped now. cause: why it was stopped last, in a line."""

    count: int
    until: float
    cause: str

    @property
    def seconds_left(self) -> float | None:
        """Until it is tried again; None: it is not stopped, or `octavo up` has not said so for too long."""
        left = self.until - time.time()
        return max(left, 0.0) if self.until and left > -_STALE_S else None


def text_of(notes: Mapping[int, QuarantineNote]) -> str:
    """Returns the file's text. notes: by the replica's number."""
    return json.dumps({str(replica): asdict(note) for replica, note in notes.items()})


def write_notes(directory: Path, text: str) -> None:
    """Replaces the file. Raises OSError."""
    new = directory / f"{FILE_NAME}.new"
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    new.rename(directory / FILE_NAME)


class QuarantineNotes:
    """Reads the file when asked, if it has changed."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE_NAME
        self._read: tuple[int, int] = (0, 0)
        self._notes: dict[int, QuarantineNote] = {}

    def of(self, replica: int) -> QuarantineNote | None:
        """Returns what the file says of a replica; None: it was never stopped. Safe from any thread."""
        try:
            found = self._path.stat()
            if (version := (found.st_ino, found.st_mtime_ns)) != self._read:
                notes = json.loads(self._path.read_text())
                self._notes = {int(number): QuarantineNote(**note) for number, note in notes.items()}
                self._read = version
        except (OSError, ValueError, TypeError, AttributeError):
            # Nobody has written it, or something else did.
            return None
        return self._notes.get(replica)
