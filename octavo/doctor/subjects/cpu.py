"""The CPU, the kernels that it runs, and the compiler that makes them."""

import os
import shutil
from collections.abc import Iterator

from kernels.native.build import (
    PATHS,
    BuildError,
    build,
    compiler_version,
    find_compiler,
    flags_of_this_cpu,
    path_of_this_cpu,
)
from octavo.doctor.check import Check, note, ok, problem
from octavo.doctor.machine import Machine, cpu_name

_SLOWER = "until then PyTorch computes, several times slower"
_SUBJECT = "CPU"


def check_cpu(machine: Machine) -> Iterator[Check]:
    """Names the kernels that this CPU runs, and the instructions that decided it."""
    flags, path, name = flags_of_this_cpu(), path_of_this_cpu(), cpu_name()
    if machine.on_gpu:
        yield ok(_SUBJECT, f"{name}; workers compute on GPUs")
        return
    reading = machine.readings["kernels"]
    if path is None:
        found = f"{name} has no AVX2, which the C++ kernels need: PyTorch computes, several times slower"
        yield note(_SUBJECT, found, "serve on an x86 CPU with AVX2 (most since 2013), or on a GPU")
        return
    better = PATHS[: PATHS.index(path)]
    why = (
        "the best there is"
        if not better
        else f"{better[-1].name} needs {', '.join(sorted(better[-1].cpu_flags - flags))}"
    )
    if machine.readings["torch"].torch is not None and reading.error:
        found = f"{name}: the kernels {path.name} do not work: {reading.error}"
        yield problem(_SUBJECT, found, "build them with another compiler: set CXX, such as CXX=clang++")
    elif reading.kernels == "":
        yield note(_SUBJECT, f"{name} can run the kernels {path.name}, but they are not built", "see compiler")
    else:
        yield ok(_SUBJECT, f"{name}: kernels {path.name} ({why})")


def check_compiler(machine: Machine) -> Iterator[Check]:
    """Builds the kernels, or finds them built; on GPUs, looks for the compiler that Triton calls."""
    if machine.on_gpu:
        yield _compiler_for_triton()
        return
    path = path_of_this_cpu()
    if path is None:
        yield ok("compiler", "not needed: there are no kernels for this CPU")
        return
    try:
        compiler = find_compiler()
    except BuildError:
        names = ", ".join(filter(None, (os.environ.get("CXX") and f"CXX={os.environ['CXX']}", "c++, g++, clang++")))
        found = f"no C++ compiler on PATH ({names})"
        yield problem("compiler", found, f"install one (Debian and Ubuntu: apt-get install g++); {_SLOWER}")
        return
    try:
        library, version = build(path), compiler_version(compiler)
    except BuildError as error:
        yield problem("compiler", str(error), f"repair it, or name another compiler with CXX; {_SLOWER}")
        return
    yield ok("compiler", f"{(version.splitlines() or [compiler])[0]}; kernels are built ({library.name})")


def _compiler_for_triton() -> Check:
    # The names that Triton itself tries.
    for name in (os.environ.get("CC"), "gcc", "clang"):
        if name and (found := shutil.which(name)):
            return ok("compiler", f"{found}, for the launchers of Triton's kernels")
    found = "no C compiler on PATH (CC, gcc, clang): Triton cannot launch its kernels"
    return problem("compiler", found, "install one (Debian and Ubuntu: apt-get install gcc), or name it with CC")
