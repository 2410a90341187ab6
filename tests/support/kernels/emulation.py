"""C++ kernels for instructions that this machine lacks: AVX-512's intrinsics as SIMDe's portable functions.

Slow, and like the hardware but for the dot of two pairs of bf16: Intel's manual adds the second product of a pair
before the first, SIMDe after it, which can differ by a rounding of the sum; and the CPUs take denormal numbers for 0.
So a test may compare the bits of this path with its own, never with those of another machine. Integers are exact.
"""

from dataclasses import replace

import simde_py

from kernels.native.build import NativePath


def emulated(path: NativePath) -> NativePath:
    """The same kernels, for any CPU with AVX2 and FMA. SIMDe's names stand for the intrinsics' in all sources."""
    return replace(
        path,
        name=f"emulated-{path.name}",
        cpu_flags=frozenset({"avx2", "fma", "f16c"}),
        compiler_flags=(
            "-O1", "-mavx2", "-mfma", "-mf16c", "-Wno-psabi",
            "-DSIMDE_ENABLE_NATIVE_ALIASES", "-isystem", simde_py.get_include(), "-include", "immintrin.h",
            "-include", "simde/x86/avx512.h",
        ),
    )  # fmt: skip
