"""The private directory of one process on a node of Ray, in which its options and its CURVE keys are."""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX, _NEW_PREFIX = "octavo-ray-", "octavo-new-"
_LOCK = "lock"


class ProcessDirectory:
    """Of mode 0700, and locked for as long as this process lives. Ray ends actors without a word: what those have left
    is removed by the next one on their machine."""

    def __init__(self) -> None:
        remove_left_ones()
        new = Path(tempfile.mkdtemp(prefix=_NEW_PREFIX))
        self._lock = os.open(new / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Only now can others find it.
        self.path = new.rename(new.with_name(new.name.replace(_NEW_PREFIX, _PREFIX)))

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_left_ones() -> None:
    """Directories that nobody holds any more; those of other users can't be looked into."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(lock)
