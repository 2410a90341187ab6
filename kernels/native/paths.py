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
    # Whether its attention over a bfloat16 cache rounds queries and weights to bfloat16.
    rounds_queries: bool


_AVX512_CPU = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "fma", "f16c"})
_AVX512_COMPILER = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mfma", "-mf16c")

# The first that a CPU can run is its path.
PATHS = (
    # AMD from Zen 4 on; Intel's Cooper Lake, and Xeons from Sapphire Rapids on.
    NativePath(
        name="avx512-bf16",
        source="avx512_bf16.cpp",
        cpu_flags=_AVX512_CPU | {"avx512_bf16"},
        compiler_flags=(*_AVX512_COMPILER, "-mavx512bf16"),
        rounds_inputs=True,
        rounds_queries=True,
    ),
    # Intel's Cascade Lake, Ice Lake and Tiger Lake.
    NativePath(
        name="avx512-vnni",
        source="avx512_vnni.cpp",
        cpu_flags=_AVX512_CPU,
        compiler_flags=_AVX512_COMPILER,
        rounds_inputs=False,
        rounds_queries=False,
    ),
    NativePath(
        name="avx2",
        source="avx2.cpp",
        cpu_flags=frozenset({"avx2", "fma", "f16c"}),
        compiler_flags=("-mavx2", "-mfma", "-mf16c"),
        rounds_inputs=True,
        rounds_queries=False,
    ),
)


def path_of_this_cpu() -> NativePath | None:
    """None: there are no kernels for this CPU."""
    flags = flags_of_this_cpu()
    return next((path for path in PATHS if path.cpu_flags <= flags), None)


def flags_of_this_cpu() -> frozenset[str]:
    """Its instructions as /proc/cpuinfo calls them; none where there is no such file."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return frozenset()
    for line in cpuinfo.read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()
