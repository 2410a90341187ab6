"""All checks, in the order of the page."""

from collections.abc import Callable, Iterator

from configs.options import Options
from octavo.doctor.check import Check, State, problem
from octavo.doctor.machine import Machine
from octavo.doctor.subjects.clock import check_clock
from octavo.doctor.subjects.cores import check_cores
from octavo.doctor.subjects.cpu import check_compiler, check_cpu
from octavo.doctor.subjects.disk import check_caches, check_disk
from octavo.doctor.subjects.gpu import check_driver, check_gpu
from octavo.doctor.subjects.huge_pages import check_huge_pages
from octavo.doctor.subjects.limits import check_open_files, check_processes
from octavo.doctor.subjects.memory import check_memory
from octavo.doctor.subjects.packages import check_packages, check_torch, check_triton
from octavo.doctor.subjects.ports import check_ports, check_runtime_directory

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
