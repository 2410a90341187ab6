"""C++ kernels for instructions that this machine lacks: SIMDe's portable functions replace AVX-512 intrinsics, avx512.h
beside this file those that SIMDe lacks, and amx.h those of tiles.

Slow. Results equal the hardware's except in the dot product of two bf16 pairs: Intel's manual adds the second product
of a pair before the first, SIMDe after it, which can differ by a rounding of the sum; and the CPUs treat denormal
numbers as 0. So a test may compare bits within this path, never with another machine's. Integers are exact.
"""

from dataclasses import replace
from pathlib import Path

import simde_py

from kernels.native.build import NativePath

_HERE = Path(__file__).parent
_TILES = ("-include", "immintrin.h", "-include", str(_HERE / "amx.h"))


def emulated(path: NativePath) -> NativePath:
    """The same kernels for any CPU with AVX2 and FMA. SIMDe redefines the intrinsics' names in all sources."""
    return replace(
        path,
        name=f"emulated-{path.name}",
        cpu_flags=frozenset({"avx2", "fma", "f16c"}),
        compiler_flags=(
            "-O1",
            "-mavx2",
            "-mfma",
            "-mf16c",
            "-Wno-psabi",
            "-DSIMDE_ENABLE_NATIVE_ALIASES",
            "-isystem",
            simde_py.get_include(),
            *_TILES,
            "-include",
            "simde/x86/avx512.h",
            "-include",
            str(_HERE / "avx512.h"),
        ),
    )


def with_emulated_tiles(path: NativePath) -> NativePath:
    """The same kernels with nothing but tiles emulated, which compiles in a sixth of the time."""
    return replace(path, name=f"emulated-tiles-{path.name}", compiler_flags=(*path.compiler_flags, "-O1", *_TILES))
