"""Shows a download from the hub: bars on a terminal, lines elsewhere."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from runtime.hub.progress import Lines, bytes_text

# More rows would fill the screen. The total counts all files.
_MOST_ROWS = 8


@contextmanager
def shown_download(console: Console) -> Iterator["DownloadDisplay"]:
    """Shows a download. If it is interrupted, says how much of it is kept."""
    display = DownloadDisplay(console)
    try:
        yield display
    except BaseException:
        display.close()
        if display.num_kept_bytes:
            console.print(
                f"{bytes_text(display.num_kept_bytes)} of {bytes_text(display.num_bytes)} are downloaded; run the "
                f"same command to continue",
                highlight=False,
            )
        raise
    display.close()


class DownloadDisplay:
    """A runtime.hub.progress.Progress that shows nothing until a download begins."""

    def __init__(self, console: Console):
        self._lines = Lines(lambda line: console.print(line, highlight=False, markup=False))
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
        )
        self._lock = threading.Lock()
        self._terminal = console.is_terminal
        self._sizes: Mapping[str, int] = {}
        self._done = dict[str, int]()
        self._rows = dict[str, TaskID]()
        self._total: TaskID | None = None

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes.values())

    @property
    def num_kept_bytes(self) -> int:
        return sum(self._done.values())

    def begin(self, repo: str, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes
        if not self._terminal:
            self._lines.begin(repo, sizes)
            return
        self._total = self._bars.add_task(repo, total=self.num_bytes)
        self._bars.start()

    def advance(self, name: str, done: int) -> None:
        with self._lock:
            self._done[name] = done
            if self._total is None:
                self._lines.advance(name, done)
            else:
                self._advance_bars(self._total, name, done)

    def _advance_bars(self, total: TaskID, name: str, done: int) -> None:
        self._bars.update(total, completed=self.num_kept_bytes)
        if name not in self._rows and len(self._rows) < _MOST_ROWS and done < self._sizes[name]:
            self._rows[name] = self._bars.add_task(f"  {name}", total=self._sizes[name])
        if name in self._rows:
            self._bars.update(self._rows[name], completed=done)
            if done >= self._sizes[name]:
                self._bars.remove_task(self._rows.pop(name))

    def check(self, name: str) -> None:
        if name in self._rows:
            self._bars.update(self._rows[name], description=f"  {name} (checksum)")

    def close(self) -> None:
        # Stopping bars that never began prints an empty line.
        if self._total is not None:
            self._bars.stop()
