"""Reports the progress of a download."""

import threading
from collections.abc import Callable, Mapping
from typing import Protocol


class Progress(Protocol):
    """Receives the progress of a download. Its methods are called from several threads."""

    def begin(self, repo: str, sizes: Mapping[str, int]) -> None:
        """sizes: bytes of each file that will be downloaded."""
        ...

    def advance(self, name: str, done: int) -> None:
        """done: bytes of the file on this machine, including those from an interrupted download."""
        ...

    def check(self, name: str) -> None:
        """The file has all its bytes; its checksum is being computed."""
        ...


class Lines:
    """Says one line at the start and one for each tenth."""

    def __init__(self, say: Callable[[str], object]):
        self._say = say
        self._lock = threading.Lock()
        self._repo = ""
        self._total = 0
        self._done = dict[str, int]()
        self._tenths = 0

    def begin(self, repo: str, sizes: Mapping[str, int]) -> None:
        self._repo, self._total = repo, sum(sizes.values())
        files = "1 file" if len(sizes) == 1 else f"{len(sizes)} files"
        self._say(f"downloading {repo}: {files}, {bytes_text(self._total)}")

    def advance(self, name: str, done: int) -> None:
        with self._lock:
            self._done[name] = done
            tenths = 10 * sum(self._done.values()) // max(self._total, 1)
            if tenths > self._tenths:
                self._tenths = tenths
                self._say(f"downloading {self._repo}: {10 * tenths}% of {bytes_text(self._total)}")

    def check(self, name: str) -> None:
        pass


def bytes_text(size: float) -> str:
    """1234567 -> 1.2 MB, in powers of 1000 as the hub shows sizes."""
    if size < 1000:
        return f"{size:.0f} B"
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 999.95:
            return f"{size:.1f} {unit}"
    return f"{size / 1000:.1f} TB"
