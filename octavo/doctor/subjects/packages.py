"""The versions of Python, PyTorch and Triton and of what else Octavo needs, and if they fit each other."""

import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from octavo.doctor.machine import Check, Machine, note, ok, problem

# In a checkout; a wheel has none.
_CONSTRAINTS = Path(__file__).resolve().parents[3] / "constraints"


def check_packages(machine: Machine) -> Iterator[Check]:
    """Compares what is installed with what Octavo requires, PyTorch aside."""
    python = f"Python {platform.python_version()}"
    required = [each for each in requirements("octavo") if each.name != "torch"]
    if not required:
        yield note("packages", f"{python}; Octavo is not installed, so versions cannot be compared", "make install")
        return
    wrong = [f"{each.name} {found or 'is missing'}, {each} is needed" for each, found in _unfit(required)]
    if wrong:
        yield problem("packages", f"{python}; {'; '.join(wrong)}", f"make install, or: {_pip(machine)} octavo")
    else:
        yield ok("packages", f"{python}, and {len(required)} packages as Octavo requires them")


def check_torch(machine: Machine) -> Iterator[Check]:
    """Says if PyTorch can be imported, and if its version is one that Octavo takes."""
    installed, reading = version_of("torch"), machine.readings["torch"]
    if installed is None:
        yield problem("PyTorch", "not installed", f"make install, or: {_pip(machine)} torch")
        return
    if reading.torch is None:
        found = f"{installed} cannot be imported: {reading.error}"
        yield problem("PyTorch", found, f"install it anew: {_pip(machine)} --force-reinstall torch")
        return
    build = "CPU build" if reading.torch.cuda is None else f"for CUDA {reading.torch.cuda}"
    required = [each for each in requirements("octavo") if each.name == "torch"]
    if unfit := _unfit(required):
        found = f"{installed} ({build}) is not {unfit[0][0].specifier}, the versions that Octavo runs with"
        yield problem("PyTorch", found, f"{_pip(machine)} torch")
        return
    yield ok("PyTorch", f"{installed} ({build}){_tested('torch', installed, machine)}")


def check_triton(machine: Machine) -> Iterator[Check]:
    """Compares Triton with what PyTorch requires, and with what Octavo's kernels are written for."""
    installed = version_of("triton")
    worse = problem if machine.on_gpu else note
    if installed is None:
        if machine.on_gpu:
            yield problem("Triton", "not installed, and the kernels of GPUs need it", f"{_pip(machine)} triton")
        else:
            yield ok("Triton", "not installed; only GPUs need it")
        return
    for package in ("torch", "octavo"):
        wanted = [each for each in requirements(package, "dev") if each.name == "triton"]
        for each, _ in _unfit(wanted):
            found = f"{installed} does not fit: {package} {version_of(package)} needs {each.specifier}"
            if not machine.on_gpu:
                found += " (workers on CPUs do not use it)"
            yield worse("Triton", found, f"{_pip(machine)} triton")
            return
    yield ok("Triton", f"{installed}{_tested('triton', installed, machine)}")


def requirements(package: str, extra: str = "") -> list[Requirement]:
    """The requirements of a package here; with an extra, that extra's too. Empty if it is not installed."""
    try:
        found = [Requirement(text) for text in metadata.requires(package) or ()]
    except metadata.PackageNotFoundError:
        return []
    return [each for each in found if each.marker is None or each.marker.evaluate({"extra": extra})]


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _unfit(required: list[Requirement]) -> list[tuple[Requirement, str | None]]:
    """The requirements that the installed versions do not meet, with these versions."""
    pairs = [(each, version_of(each.name)) for each in required]
    return [
        (each, found) for each, found in pairs if found is None or not each.specifier.contains(found, prereleases=True)
    ]


def _constraints(machine: Machine) -> Path:
    torch = machine.readings["torch"].torch
    for_gpus = machine.on_gpu or (torch is not None and torch.cuda is not None)
    return _CONSTRAINTS / ("cuda.txt" if for_gpus else "cpu.txt")


def _pip(machine: Machine) -> str:
    file = _constraints(machine)
    return f"pip install -c constraints/{file.name}" if file.is_file() else "pip install"


def _tested(package: str, installed: str, machine: Machine) -> str:
    """Compares a version with the one that Octavo's tests run with."""
    file = _constraints(machine)
    lines = file.read_text().splitlines() if file.is_file() else []
    for line in lines:
        name, _, pinned = line.partition("==")
        if name == package:
            tested = Version(pinned.partition(",")[0])
            same = tested.public == Version(installed).public
            return ", as tested" if same else f"; {tested} is tested (constraints/{file.name})"
    return ""
