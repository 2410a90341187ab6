"""What is made of files that are replaced while a process runs, such as certificates that are renewed."""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

log = logging.getLogger("octavo.files")

_Made = TypeVar("_Made")


class Renewed(Generic[_Made]):
    """Makes it anew once a file has changed. Safe to use from several threads."""

    def __init__(self, paths: Sequence[Path], make: Callable[[], _Made]) -> None:
        """make: raises ValueError, with the cause, if the files can't be used; whatever else it raises is a bug."""
        self._paths, self._make = paths, make
        self._lock = threading.Lock()
        # Before they are read: what is replaced meanwhile is seen the next time.
        self._seen = self._look()
        self._made = make()

    def current(self) -> _Made:
        """Costs a stat a file. Files that can't be used are logged, once, and leave everything as it was."""
        with self._lock:
            seen = self._look()
            if seen != self._seen:
                self._seen = seen
                self._renew()
            return self._made

    def _renew(self) -> None:
        names = ", ".join(map(str, self._paths))
        try:
            self._made = self._make()
        except ValueError as error:
            log.error("%s; what was read of them before stays in force", error)
        else:
            log.info("read again, for they have changed: %s", names)

    def _look(self) -> list[tuple[int, int, int] | None]:
        return [_mark(path) for path in self._paths]


def _mark(path: Path) -> tuple[int, int, int] | None:
    """Another one for another content. A file that is moved into the place of another may be older than that."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
