"""The output of `octavo up` about its processes."""

import io
from pathlib import Path

from rich.console import Console

from configs.options import Options
from octavo.cluster.display import Display
from octavo.cluster.processes import cluster_processes


def test_lines_of_processes_come_after_text_that_is_streamed_and_none_is_lost() -> None:
    specs = cluster_processes(Options(), Path("options.yaml"), num_cores=2)
    console = Console(file=io.StringIO(), width=200)
    display = Display(specs, console, verbose=False)
    display.line(specs[0], "before")
    with display.holding():
        console.out("The capital", end="")
        display.line(specs[0], "ready")
        display.event(specs[1], "was killed")
        console.out(" is Paris.")
    display.line(specs[0], "after")
    assert isinstance(console.file, io.StringIO)
    said = [line.partition("| ")[2] or line for line in console.file.getvalue().splitlines()]
    assert said == ["before", "The capital is Paris.", "ready", f"{specs[1].name} was killed", "after"]


def test_a_quoted_level_hides_no_line() -> None:
    specs = cluster_processes(Options(), Path("options.yaml"), num_cores=2)
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    display = Display(specs, console, verbose=False)
    try:
        display.line(specs[0], "2026-11-23T00:00:00.000000Z [info     ] calm process=router")
        display.line(specs[0], "2026-11-23T00:00:00.000000Z [error    ] bad: '[info ]' process=router")
        display.line(specs[0], "  ValueError: [info     ]")
    finally:
        display.loaded()
    assert isinstance(console.file, io.StringIO)
    said = console.file.getvalue()
    assert ("calm" in said, "bad" in said, "ValueError" in said) == (False, True, True)
