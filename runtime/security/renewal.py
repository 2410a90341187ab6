"""Objects made from files that are replaced while a process runs, such as renewed certificates."""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

log = logging.getLogger("octavo.files")

_Made = TypeVar("_Made")


class Renewed(Generic[_Made]):
    """An object that is made again whenever one of its files has changed. Safe to use from several threads."""

    def __init__(self, paths: Sequence[Path], make: Callable[[], _Made]) -> None:
        """make: raises ValueError, with the cause, if the files can't be used; any other exception is a bug."""
        self._paths, self._make = paths, make
        self._lock = threading.Lock()
        # Before reading the files, so that a file replaced meanwhile is noticed the next time.
        self._seen = self._look()
        self._made = make()

    def current(self) -> _Made:
        """Returns the current object, at the cost of one stat per file. Files that can't be used are logged once, and
        the previous object stays."""
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
            log.error("%s; what was read before stays in force", error)
        else:
            log.info("read changed files again: %s", names)

    def _look(self) -> list[tuple[int, int, int] | None]:
        return [_mark(path) for path in self._paths]


def _mark(path: Path) -> tuple[int, int, int] | None:
    """A mark that differs if the content differs. It includes the inode, because a file that replaces another by a move
    may be the older one."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
