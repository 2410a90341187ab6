"""The page that `octavo doctor` shows: a table for people, a line of JSON a check for programs."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from octavo.doctor.check import Check, State
from octavo.reports import print_json

_STYLES = {State.OK: "green", State.NOTE: "yellow", State.PROBLEM: "bold red"}


def print_page(checks: Iterable[Check], console: Console) -> list[Check]:
    """Prints a table of all checks and their count. Returns the checks."""
    with console.status("looking at this machine"):
        found = list(checks)
    console.print(table_of(found))
    counts = Counter(check.state for check in found)
    words = [
        f"{counts[state]} {state}{'s' * (counts[state] > 1)}" for state in (State.PROBLEM, State.NOTE) if counts[state]
    ]
    console.print(f"{', '.join(words)}." if words else "Nothing to do.", highlight=False)
    return found


def print_lines(checks: Iterable[Check]) -> list[Check]:
    """Prints each check as one JSON object: subject, state, found, advice. Returns the checks."""
    found: list[Check] = []
    for check in checks:
        found.append(check)
        print_json(asdict(check))
    return found


def table_of(checks: Sequence[Check]) -> Table:
    """One row a check, with its advice on a line below what was found."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        style = _STYLES[check.state]
        text = Text(check.found)
        if check.advice:
            text.append(f"\nto do: {check.advice}", style)
        table.add_row(Text(check.state, style), Text(check.subject, "bold"), text)
    return table
