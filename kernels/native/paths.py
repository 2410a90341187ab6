"""Which instructions a CPU has, and which set of kernels is for them."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class NativePath:
    """A set of kernels: one C++ file, compiled for some instructions."""

    # Stands in fingerprints and log lines.
    name: str
    source: str
    # As /proc/cpuinfo calls the instructions.
    cpu_flags: frozenset[str]
    compiler_flags: tuple[str, ...]
    # Whether its linears of bfloat16 weights round their inputs to bfloat16.
    rounds_inputs: bool


# The first that a CPU can run is its path.
PATHS = (
    NativePath(
        name="avx512-bf16",
        source="avx512_bf16.cpp",
        cpu_flags=frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "fma", "f16c"}),
        compiler_flags=("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16", "-mfma", "-mf16c"),
        rounds_inputs=True,
    ),
    NativePath(
        name="avx2",
        source="avx2.cpp",
        cpu_flags=frozenset({"avx2", "fma", "f16c"}),
        compiler_flags=("-mavx2", "-mfma", "-mf16c"),
        rounds_inputs=True,
    ),
)


def path_of_this_cpu() -> NativePath | None:
    """None: there are no kernels for this CPU."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return None
    flags = set[str]()
    for line in cpuinfo.read_text().splitlines():
        if line.startswith("flags"):
            flags = set(line.partition(":")[2].split())
            break
    return next((path for path in PATHS if path.cpu_flags <= flags), None)
