"""All checks in the order of the page, and the page: a table for people, a line of JSON a check for programs."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from configs.options import Options
from octavo.doctor.machine import Check, Machine, State, problem
from octavo.doctor.subjects.cpu import check_compiler, check_cores, check_cpu, check_huge_pages
from octavo.doctor.subjects.disk import check_caches, check_disk
from octavo.doctor.subjects.gpu import check_driver, check_gpu
from octavo.doctor.subjects.limits import (
    check_clock,
    check_open_files,
    check_ports,
    check_processes,
    check_runtime_directory,
)
from octavo.doctor.subjects.memory import check_memory
from octavo.doctor.subjects.packages import check_packages, check_torch, check_triton
from octavo.reports import print_json

_CHECKS: dict[str, Callable[[Machine], Iterator[Check]]] = {
    # The compiler first: it builds the kernels that the probe checks, and takes its time.
    "compiler": check_compiler,
    "CPU": check_cpu,
    "cores": check_cores,
    "huge pages": check_huge_pages,
    "GPU": check_gpu,
    "driver": check_driver,
    "packages": check_packages,
    "PyTorch": check_torch,
    "Triton": check_triton,
    "options": lambda machine: _check_refusal(machine),
    "memory": check_memory,
    "ports": check_ports,
    "runtime directory": check_runtime_directory,
    "caches": check_caches,
    "disk": check_disk,
    "open files": check_open_files,
    "processes": check_processes,
    "clock": check_clock,
}


def examine(machine: Machine) -> Iterator[Check]:
    """Yields each line as soon as it is known. A check that fails is a problem line of its own, and costs no other."""
    for subject, check in _CHECKS.items():
        try:
            yield from check(machine)
        except Exception as error:  # noqa: BLE001 - what is broken here is what this looks for
            found = f"could not be checked: {type(error).__name__}: {error}"
            yield problem(
                subject, found, "mend what the message names; if nothing on this machine is at fault, report it"
            )


def _check_refusal(machine: Machine) -> Iterator[Check]:
    """The options that workers refuse."""
    for reader in ("refusal", "model"):
        if refusal := machine.readings[reader].refusal:
            yield problem("options", refusal, "change that option; `octavo up --help` explains it")


def problems(options: Options) -> list[Check]:
    """The lines that say why a cluster with these options fails here."""
    return [check for check in examine(Machine(options=options)) if check.state is State.PROBLEM]


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
