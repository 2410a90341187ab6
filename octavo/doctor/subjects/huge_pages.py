"""Huge pages: what the kernel allows, and what it gives."""

import mmap
import re
from collections.abc import Iterator
from pathlib import Path

from octavo.doctor.check import Check, note, ok
from octavo.doctor.machine import Machine

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
