"""A page of memory with a number that changes while a process makes progress, for the program that started it.

It works when nothing else does: on a full disk, and while hostile connections occupy the HTTP server.
"""

import mmap
import os
import struct

# The descriptor of the page, for the process that shows progress.
PROGRESS_FD = "OCTAVO_PROGRESS_FD"
_COUNT = struct.Struct("Q")


class ProgressPage:
    """The count of a process: 0 while it starts, then a new number as long as it makes progress.

    Each process has a page of its own: one that was replaced cannot write its successor's.
    """

    def __init__(self, descriptor: int) -> None:
        """descriptor: of a page made by `create`; it belongs to this object."""
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, mmap.PAGESIZE)

    @classmethod
    def create(cls) -> "ProgressPage":
        """Makes the page of a process that this one starts. Raises OSError."""
        descriptor = os.memfd_create("octavo-progress", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, mmap.PAGESIZE)
            return cls(descriptor)
        except OSError:
            os.close(descriptor)
            raise

    @classmethod
    def inherited(cls) -> "ProgressPage | None":
        """Opens the page that the starting program made for this process; None if there is none. Children of this
        process do not get it."""
        number = os.environ.pop(PROGRESS_FD, None)
        if number is None:
            return None
        descriptor = int(number)
        os.set_inheritable(descriptor, False)
        return cls(descriptor)

    @property
    def environment(self) -> dict[str, str]:
        """The variable by which a process finds this page; it must inherit `descriptor`, too."""
        return {PROGRESS_FD: str(self.descriptor)}

    @property
    def count(self) -> int:
        return _COUNT.unpack_from(self._memory)[0]

    def advance(self) -> None:
        """Shows progress."""
        _COUNT.pack_into(self._memory, 0, self.count + 1)

    def close(self) -> None:
        self._memory.close()
        os.close(self.descriptor)
