"""`octavo doctor`."""

from typing import Annotated, Any

import typer

from octavo.cli.flags import CONFIG_FLAG, SNAKE_CASE_FLAGS, options_from_flags, with_option_flags


def register(app: typer.Typer, group: str) -> None:
    app.command(name="doctor", rich_help_panel=group, context_settings=SNAKE_CASE_FLAGS)(with_option_flags(doctor))


def doctor(
    config: CONFIG_FLAG = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object per line, for programs: subject, state, found, advice."),
    ] = False,
    **flags: Any,
) -> None:
    """Check this machine, and say what to change.

    Takes the options of `octavo up`, and checks what a cluster with them needs: CPU, compiler, huge pages, cores, GPU,
    driver, versions, ports, caches, disk space, memory for the model, clock and limits. Each line is ok, a note (a
    cluster runs, but could run better) or a problem (it does not start, fails later, or is several times slower than
    it should be), with what to do. Exits with 1 if there is a problem.

    Example: [bold]octavo doctor -c configs/local.yaml --model ./my-model[/]
    """
    # Imported here: `octavo --help` does not need them.
    from rich.console import Console

    from octavo.doctor.check import State
    from octavo.doctor.examine import examine
    from octavo.doctor.machine import Machine
    from octavo.doctor.page import print_lines, print_page

    checks = examine(Machine(options=options_from_flags(config, flags)))
    found = print_lines(checks) if as_json else print_page(checks, Console())
    raise typer.Exit(any(check.state is State.PROBLEM for check in found))
