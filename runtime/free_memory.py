"""Returns memory to the system that malloc keeps after it was freed."""

import contextlib
import ctypes
import logging
import resource
import threading
from collections.abc import Iterator

log = logging.getLogger("octavo.memory")

# Looks at the process's size so often; while it is large for a reason, more seldom.
_EVERY_S, _MOST_SELDOM_S = 10.0, 40.0
# Grown by less than this part, it is left alone.
_GROWTH = 0.05


def give_back_free_memory() -> None:
    """Returns freed memory that malloc holds to the system, if the C library supports it."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


class _Giver(threading.Thread):
    """Gives free memory back after the process has grown: malloc keeps what a burst of large messages leaves between
    what lives on."""

    def __init__(self) -> None:
        super().__init__(name="free_memory", daemon=True)
        self.is_over = threading.Event()
        # The size that stayed after memory was given back.
        self._kept = resident_bytes()
        self.wait_s = _EVERY_S

    def run(self) -> None:
        while not self.is_over.wait(self.wait_s):
            self.look()

    def look(self) -> None:
        size = resident_bytes()
        if size <= self._kept * (1 + _GROWTH):
            self._kept = min(self._kept, size)
            self.wait_s = _EVERY_S
            return
        give_back_free_memory()
        left = resident_bytes()
        gave = size - left
        log.debug("gave %d of %d bytes back", gave, size)
        # If most of it is in use, the next look may wait longer.
        self.wait_s = _EVERY_S if gave > _GROWTH * size else min(2 * self.wait_s, _MOST_SELDOM_S)


def resident_bytes() -> int:
    """The memory of this process; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


@contextlib.contextmanager
def giving_memory_back() -> Iterator[None]:
    """Gives free memory back to the system while inside, on a thread of its own."""
    giver = _Giver()
    giver.start()
    try:
        yield
    finally:
        giver.is_over.set()
        giver.join()
