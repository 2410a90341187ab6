"""CPUs: the kernels that they run, the compiler that makes them, the cores, and huge pages."""

import mmap
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from kernels.native.build import (
    PATHS,
    BuildError,
    build,
    compiler_version,
    find_compiler,
    flags_of_this_cpu,
    path_of_this_cpu,
)
from kernels.native.cores import control_groups, cpu_quota, usable_cores
from octavo.doctor.machine import Check, Machine, cpu_name, note, ok, problem

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


def check_cores(machine: Machine) -> Iterator[Check]:
    """Compares the cores with the workers and their threads."""
    cores, quota, usable = len(usable_cores()), cpu_quota(control_groups("cpu")), machine.num_cores
    there = f"{cores} of {os.cpu_count()} cores" if cores != os.cpu_count() else f"{cores} cores"
    limit = "no CPU quota" if quota is None else f"a CPU quota of {quota:g} cores"
    workers, options = machine.num_workers, machine.options
    if machine.on_gpu:
        yield ok("cores", f"{there}, {limit}")
        return
    threads = options.worker_threads or max(1, usable // workers)
    found = f"{there}, {limit}; {workers} worker{'s' * (workers > 1)} with {threads} thread{'s' * (threads > 1)} each"
    if workers * threads > usable:
        advice = (
            f"use at most {usable} workers" if workers > usable else f"use worker_threads={max(1, usable // workers)}"
        )
        yield note(
            "cores", f"{found}: more threads than the {usable} that can compute at once", f"{advice}, or more cores"
        )
    else:
        yield ok("cores", found)


SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_STATUS = Path("/proc/self/status")
_ROLLUP = Path("/proc/self/smaps_rollup")
_SIZE = 2 * 2**20
_TRIED = 8
# docs/architecture.md: all linears of the small model at one row, 14.0 ms in small pages, 11.1 in huge ones.
_COST = "decode steps take up to a quarter longer"


def check_huge_pages(machine: Machine) -> Iterator[Check]:
    """Asks for huge pages as workers do, and counts what comes."""
    if machine.on_gpu:
        yield ok("huge pages", "not needed: weights and KV are on GPUs")
    elif not SETTING.is_file():
        found = f"this kernel has none (no {SETTING}): {_COST}"
        yield note("huge pages", found, "use a Linux kernel with transparent huge pages")
    elif (setting := _setting()) == "never":
        found = f"turned off on this machine ({SETTING} is never): {_COST}"
        yield note("huge pages", found, f"as root: echo madvise > {SETTING}")
    elif re.search(r"^THP_enabled:\s*0", _STATUS.read_text(), re.MULTILINE):
        found = f"turned off for this process and its children (prctl PR_SET_THP_DISABLE): {_COST}"
        yield note("huge pages", found, "start Octavo without the program or service setting that turns them off")
    elif (given := huge_pages_given(_TRIED)) < _TRIED:
        found = f"setting {setting}, but the kernel gave {given} of {_TRIED} pages: memory is short or fragmented"
        yield note("huge pages", found, "free memory, or as root: echo 1 > /proc/sys/vm/compact_memory")
    else:
        yield ok("huge pages", f"setting {setting}; the kernel gave {given} of {_TRIED} pages of 2 MiB")


def _setting() -> str:
    """Returns the word in brackets of "always [madvise] never"."""
    found = re.search(r"\[(\w+)\]", SETTING.read_text())
    return found[1] if found else "unknown"


def huge_pages_given(count: int) -> int:
    """Maps memory for so many huge pages, writes to it, and returns how many came."""
    before = _resident()
    # One more than asked for: the mapping need not begin at the start of a page.
    with mmap.mmap(-1, (count + 1) * _SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapping:
        mapping.madvise(mmap.MADV_HUGEPAGE)
        for offset in range(0, len(mapping), mmap.PAGESIZE):
            mapping[offset] = 1
        return min(count, (_resident() - before) // _SIZE)


def _resident() -> int:
    """Bytes of this process in huge pages."""
    found = re.search(r"^AnonHugePages:\s*(\d+) kB", _ROLLUP.read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
