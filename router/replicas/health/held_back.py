"""Replicas that get no requests because an operator, or `octavo up`, says so."""

from enum import Enum
from pathlib import Path

from runtime.telemetry.quarantine import QuarantineNotes


class Hold(Enum):
    """An operator's word on a replica, at this router alone."""

    NONE = "none"
    # No new requests; its streams stay.
    PAUSED = "paused"
    # No new requests, and its streams move away.
    DRAINED = "drained"


class Quarantined:
    """Tells if `octavo up` has put a replica into quarantine, from its file. Safe from any thread."""

    def __init__(self, runtime_dir: Path | None, replica: int) -> None:
        """runtime_dir: None: there is no file."""
        self._notes = None if runtime_dir is None else QuarantineNotes(runtime_dir)
        self._replica = replica

    @property
    def is_so(self) -> bool:
        note = None if self._notes is None else self._notes.of(self._replica)
        return note is not None and note.seconds_left is not None

    @property
    def count(self) -> int:
        """Times that it was put there."""
        note = None if self._notes is None else self._notes.of(self._replica)
        return 0 if note is None else note.count

    def describe(self) -> str:
        """Says why, and for how long it is still stopped; empty if it is not."""
        note = None if self._notes is None else self._notes.of(self._replica)
        if note is None or (left := note.seconds_left) is None:
            return ""
        return f"in quarantine, tried again in {left:.0f} s: {note.cause}"
