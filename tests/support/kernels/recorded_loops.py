"""The most that loops around tensor cores may cost: a table, recorded with all Triton versions that are supported.

`python -m benchmarks.kernels.triton_versions --record` writes it anew. A build that is not in the table fails.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from kernels.triton_common.kernel_build import KernelBuild

RECORDED_ARCH = 90
_TABLE = Path(__file__).with_name("recorded_loops.txt")
_HEAD = """\
# Loops around tensor cores, compiled for sm_90: the most of all supported Triton versions. Written by
# `python -m benchmarks.kernels.triton_versions --record`.
# op, build, instructions of all threads for each token (attention) or weight (GEMMs), plain loads in a turn
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopLimit:
    instructions: float = 0.0
    plain_loads: int = 0


def numbers_of_a_turn(build: KernelBuild) -> int:
    """Tokens or weights that a turn of a build's loop takes."""
    sizes = build.constexprs
    if "TOKENS" in sizes:
        return sizes["TOKENS"]
    return sizes["BLOCK_N"] * sizes.get("BLOCK_K", 2 * sizes.get("GROUP_K", 0)) if "BLOCK_N" in sizes else 1


def instructions_per_number(build: KernelBuild, longest_loop: int) -> float:
    """Instructions of all threads in a turn of the longest loop, for each token or weight; 0 without loop."""
    return longest_loop * 32 * build.num_warps / numbers_of_a_turn(build) if longest_loop else 0.0


@lru_cache
def recorded_loops() -> dict[tuple[str, str], LoopLimit]:
    """Limits by op and build, without the architecture in its name."""
    limits: dict[tuple[str, str], LoopLimit] = {}
    for line in _TABLE.read_text().splitlines():
        if not line.startswith("#"):
            op, build, instructions, plain_loads = line.split()
            limits[op, build] = LoopLimit(instructions=float(instructions), plain_loads=int(plain_loads))
    return limits


def write_recorded_loops(limits: Mapping[tuple[str, str], LoopLimit]) -> None:
    """Instructions are rounded up to hundredths, so that the build which was recorded fits."""
    lines = [
        f"{op} {build} {math.ceil(limit.instructions * 100) / 100:.2f} {limit.plain_loads}\n"
        for (op, build), limit in sorted(limits.items())
    ]
    _TABLE.write_text(_HEAD + "".join(lines))
