"""Peak memory of a process and its descendants."""

import threading
from pathlib import Path
from types import TracebackType

import psutil

INTERVAL = 1.0


class MemoryPeak:
    """The largest sum of the processes' PSS (pages that several share are counted once), sampled each second.

    A sample walks the page tables, a few ms for some GiB.
    """

    def __init__(self, pid: int) -> None:
        self._parent = psutil.Process(pid)
        self._peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="memory-peak", daemon=True)

    def __enter__(self) -> "MemoryPeak":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def mib(self) -> int:
        return round(self._peak / 2**20)

    def _sample(self) -> None:
        while not self._stop.wait(INTERVAL):
            self._peak = max(self._peak, _tree_pss(self._parent))


def _tree_pss(parent: psutil.Process) -> int:
    """Bytes."""
    try:
        return sum(_pss(process.pid) for process in (parent, *parent.children(recursive=True)))
    except psutil.NoSuchProcess:
        return 0


def _pss(pid: int) -> int:
    """0 of a process that has ended meanwhile."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
