"""`octavo --help` as a newcomer sees it."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from typer.main import get_command
from typer.testing import CliRunner

from octavo.cli.main import GROUPS, app

# One line beside the longest name in a terminal of 80 columns.
LONGEST_LINE = 66


def shown(*arguments: str, width: int = 80) -> str:
    """Returns what a command prints in a terminal of this width, without colours."""
    result = CliRunner(env={"COLUMNS": str(width)}).invoke(app, arguments)
    return re.sub(r"\x1b\[[0-9;]*m", "", result.stdout)


def panels(text: str) -> dict[str, list[str]]:
    """Maps the title of each panel to the names that begin its lines."""
    found, title = defaultdict[str, list[str]](list), ""
    for line in text.splitlines():
        if heading := re.match(r"╭─ (.+?) ─+╮", line):
            title = heading[1]
        elif name := re.match(r"│ (\w[\w-]*) ", line):
            found[title].append(name[1])
    return found


def commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields each command with its name, those of groups too."""
    for name, command in group.commands.items():
        yield prefix + name, command
        if hasattr(command, "commands"):
            yield from commands(command, f"{prefix}{name} ")


def test_each_command_stands_in_exactly_one_group() -> None:
    found = panels(shown("--help"))
    assert list(found) == list(GROUPS)
    times = Counter(name for names in found.values() for name in names)
    assert set(times.values()) == {1}
    assert set(times) == {name for name, _ in commands(get_command(app)) if " " not in name}


def test_each_command_is_told_in_one_line() -> None:
    for name, command in commands(get_command(app)):
        line = command.help.split("\n\n")[0]
        assert line.endswith("."), name
        assert len(line) <= LONGEST_LINE, name


def test_paragraphs_are_wrapped_to_the_terminal_not_as_in_the_source() -> None:
    for name, command in commands(get_command(app)):
        assert not re.search(r"\S\n\S", command.help), name


def test_brackets_in_an_options_help_are_shown() -> None:
    assert "octavo[tracing]" in shown("up", "--help", width=200)
