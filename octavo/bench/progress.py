"""A progress bar for people, on stderr, so that results alone are on stdout."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def progress_bar(label: str, total: int, *, hidden: bool) -> Iterator[Callable[[int], None]]:
    """Gives what to call with each advance. Shows nothing if hidden, or away from a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Few refreshes: the machine that is measured may be this one.
    bar = Progress(
        *columns, console=console, transient=True, refresh_per_second=2, disable=hidden or not console.is_terminal
    )
    with bar:
        task = bar.add_task(label, total=total)
        yield lambda count: bar.advance(task, count)
