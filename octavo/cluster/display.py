"""The output of `octavo up`: a table while the cluster loads, and the processes' log lines."""

import atexit
import io
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from octavo.cluster.processes import ProcessSpec, Stage
from runtime.telemetry.log_writer import LogWriter

_MAX_QUEUED_BYTES = 4 * 2**20
# The longest that the end waits for the last lines to be read.
_LAST_WORDS_S = 2.0
_STYLES = {Stage.ROUTER: "cyan", Stage.SCHEDULER: "magenta", Stage.WORKER: "blue"}
# Both forms of runtime.telemetry.logs: "[info     ]" and {"level": "info"}.
_CALM_LINE = re.compile(r'^\S+ \[(debug|info)\s*\]|"level": "(debug|info)"')


class Output(io.TextIOBase):
    """Standard output for a Console: a stopped or dead terminal (Ctrl-S, a lost ssh) does not hold the caller back."""

    def __init__(self) -> None:
        words = "octavo: {} pieces of output were dropped here, because nothing read them\n"
        self._writer = LogWriter(sys.stdout.fileno(), _MAX_QUEUED_BYTES, words.format)
        self._is_terminal = sys.stdout.isatty()
        atexit.register(self.drain)

    def write(self, text: str) -> int:
        self._writer.put(text)
        return len(text)

    def isatty(self) -> bool:
        return self._is_terminal

    def drain(self) -> None:
        """Waits until all is written, at most 2 s."""
        self._writer.flush(_LAST_WORDS_S)


class Display:
    """Shows the states of processes until `loaded`, and their lines at any time.

    On a terminal, the states are a table that updates in place, and info lines of processes are hidden unless verbose.
    Elsewhere, each change is a plain line.
    """

    def __init__(self, specs: Sequence[ProcessSpec], console: Console, *, verbose: bool):
        self._console = console
        self._width = max(len(spec.name) for spec in specs)
        self._states = {spec.name: "starting" for spec in specs}
        self._styles = {spec.name: _STYLES[spec.stage] for spec in specs}
        self._well: set[str] = set()
        self._hold_back = console.is_terminal and not verbose
        # None: lines are printed as they arrive.
        self._held: list[str] | None = None
        self._began = time.monotonic()
        self._spinner = Spinner("dots")
        self._live = Live(get_renderable=self._table, console=console, refresh_per_second=8, transient=True)
        if console.is_terminal:
            self._live.start()

    @property
    def elapsed(self) -> float:
        """Seconds since this display was made."""
        return time.monotonic() - self._began

    def state(self, spec: ProcessSpec, text: str, well: bool) -> None:
        """Shows the state that a process reports."""
        if well:
            self._well.add(spec.name)
        else:
            self._well.discard(spec.name)
        before, self._states[spec.name] = self._states[spec.name], text
        # Without a terminal, a growing percentage is not worth a line.
        if not self._console.is_terminal and _without_digits(before) != _without_digits(text):
            self.line(spec, text)

    def line(self, spec: ProcessSpec, text: str) -> None:
        """Shows a line that a process wrote."""
        if self._hold_back and _CALM_LINE.search(text):
            return
        self._print(f"[{self._styles[spec.name]}]{spec.name:<{self._width}}[/] | {escape(text)}")

    def event(self, spec: ProcessSpec, text: str) -> None:
        """Shows an event of a process, such as its death."""
        self._states[spec.name] = text
        self._well.discard(spec.name)
        self._print(f"[bold yellow]{spec.name}[/] {escape(text)}")

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Holds lines back until the block ends, so that they do not mix with streamed text."""
        held = self._held = list[str]()
        try:
            yield
        finally:
            self._held = None
            for text in held:
                self._print(text)

    def loaded(self) -> None:
        """Ends the table; from now on every line is shown."""
        self._live.stop()
        self._hold_back = False

    def _print(self, text: str) -> None:
        if self._held is not None:
            self._held.append(text)
        else:
            self._console.print(text, highlight=False, soft_wrap=True)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, state in self._states.items():
            mark = Text("✓", "green") if name in self._well else self._spinner
            table.add_row(mark, Text(name, self._styles[name]), Text(state, overflow="ellipsis", no_wrap=True))
        table.add_row("", "", Text(f"{self.elapsed:.0f} s", "dim"))
        return table


def _without_digits(text: str) -> str:
    return re.sub(r"[\d.]+", "", text)
