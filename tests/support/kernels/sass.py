"""Reads a GPU's machine code (SASS) as ptxas made it: what the innermost loops execute, and what slows them down.

Two faults led here, neither of which any result shows: an e4m3 cache whose values were read from shared memory byte by
byte, and 4-bit weights whose scales were loaded within the loop, where each turn waits for them.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# `/*0f10*/   @P2 LDL R36, [R1] ;` is an instruction: its address, a predicate, its name, its operands.
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")
_TARGET = re.compile(r"0x([0-9a-f]+)\s*$")
# Instructions of tensor cores: mma, wgmma, and Blackwell's tcgen05.
_TENSOR_CORES = ("HMMA", "IMMA", "QMMA", "OMMA", "HGMMA", "IGMMA", "QGMMA", "UTCHMMA", "UTCQMMA", "UTCIMMA")
# Asynchronous copies from global to shared memory have 4 bytes unless the name says 64 or 128 bits.
_COPY = "LDGSTS"
# The share of bytes that has to come by copies of 16 bytes. Block tables and scales may come by smaller ones.
_LEAST_WIDE_SHARE = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A loop that contains no other, with numbers of instructions that a warp executes in a turn."""

    instructions: int
    tensor_cores: int
    # Loads of single bytes, and of two, from shared memory.
    byte_loads: int
    short_loads: int
    # Accesses to local memory, where spilled registers are.
    spills: int
    # Loads from global memory into registers, whose result this turn or the next waits for.
    plain_loads: int
    # Asynchronous copies of less than 16 bytes, and their bytes a thread; and those of 16 bytes.
    narrow_copies: int
    narrow_bytes: int
    wide_copies: int


def disassembled(cubin: bytes) -> str:
    """The text of cuobjdump, which Triton ships."""
    return cuobjdump(cubin, "--dump-sass")


def cuobjdump(cubin: bytes, option: str) -> str:
    import triton.backends.nvidia

    program = Path(next(iter(triton.backends.nvidia.__path__))) / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(program), option, file.name], capture_output=True, text=True, check=True).stdout


def innermost_loops(sass: str) -> list[Loop]:
    """The innermost loops of a kernel in the order of their addresses. A loop is what a branch backward repeats."""
    found = [(int(address, 16), name, rest) for address, name, rest in _INSTRUCTION.findall(sass)]
    assert found, f"no instruction found in {sass[:200]!r}"
    spans: set[tuple[int, int]] = set()
    for address, name, rest in found:
        target = _TARGET.search(rest)
        if name.split(".")[0] == "BRA" and target and int(target[1], 16) < address:
            spans.add((int(target[1], 16), address))
    return [
        _loop([name for address, name, _ in found if first <= address <= last])
        for first, last in sorted(spans)
        if not any(first <= low and high <= last and (low, high) != (first, last) for low, high in spans)
    ]


def _loop(names: Sequence[str]) -> Loop:
    counts: Counter[str] = Counter()
    narrow_bytes = 0
    for name in names:
        base, *parts = name.split(".")
        counts["tensor_cores"] += base in _TENSOR_CORES
        counts["byte_loads"] += base == "LDS" and bool({"U8", "S8"} & {*parts})
        counts["short_loads"] += base == "LDS" and bool({"U16", "S16"} & {*parts})
        counts["spills"] += base in ("LDL", "STL")
        counts["plain_loads"] += base == "LDG"
        if base == _COPY:
            is_wide = "128" in parts
            counts["wide_copies" if is_wide else "narrow_copies"] += 1
            narrow_bytes += 0 if is_wide else 8 if "64" in parts else 4
    fields = ("tensor_cores", "byte_loads", "short_loads", "spills", "plain_loads", "narrow_copies", "wide_copies")
    return Loop(instructions=len(names), narrow_bytes=narrow_bytes, **{field: counts[field] for field in fields})


def flaws(loops: Sequence[Loop], *, plain_loads: int = 0) -> list[str]:
    """Returns what is slow in innermost loops. plain_loads: those that a loop around tensor cores may have."""
    found: list[str] = []
    for loop in loops:
        if loop.spills:
            found.append(f"{loop.spills} accesses to spilled registers in an innermost loop")
        if loop.byte_loads:
            found.append(f"{loop.byte_loads} loads of single bytes from shared memory in an innermost loop")
        if not loop.tensor_cores:
            continue
        if loop.plain_loads > plain_loads:
            found.append(f"{loop.plain_loads} plain loads in a loop around tensor cores, not {plain_loads}")
        wide = 16 * loop.wide_copies
        if loop.narrow_bytes and wide < _LEAST_WIDE_SHARE * (wide + loop.narrow_bytes):
            found.append(f"{loop.narrow_copies} asynchronous copies of less than 16 bytes beside {loop.wide_copies}")
    return found
