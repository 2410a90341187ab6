"""The progress of a tuning run or a sweep."""

import time

from rich import progress
from rich.console import Console


class Progress:
    """Shows what is measured, and about how long the rest takes: a line that changes on a terminal, else a line for
    each result."""

    def __init__(self, *, hidden: bool) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._hidden = hidden
        columns = (
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=20),
            progress.TimeElapsedColumn(),
        )
        self._bar = progress.Progress(
            *columns,
            console=self._console,
            transient=True,
            refresh_per_second=2,
            disable=hidden or not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None)
        self._left = 0
        self._num_begun, self._start = 0, time.monotonic()

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def expect(self, num_trials: int) -> None:
        """So many trials are left."""
        assert num_trials >= 0
        self._left = num_trials

    def begin(self, text: str) -> None:
        """A trial begins."""
        left = ""
        if self._num_begun and self._left:
            minutes = self._left * (time.monotonic() - self._start) / self._num_begun / 60
            left = f", about {minutes:.0f} min left" if minutes >= 1.5 else ", about a minute left"
        self._num_begun += 1
        self._bar.update(
            self._task, description=f"{text}{left}", total=self._num_begun + self._left, completed=self._num_begun
        )
        if not self._hidden and not self._console.is_terminal:
            self._console.print(f"{text}{left}", markup=False, soft_wrap=True)

    def say(self, text: str) -> None:
        if not self._hidden:
            self._console.print(text, style="dim", markup=False, soft_wrap=True)
