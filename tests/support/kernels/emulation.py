"""C++ kernels for instructions that this machine lacks: SIMDe's portable functions replace AVX-512 intrinsics.

Slow. Results equal the hardware's except in the dot product of two bf16 pairs: Intel's manual adds the second product
of a pair before the first, SIMDe after it, which can differ by a rounding of the sum; and the CPUs treat denormal
numbers as 0. So a test may compare bits within this path, never with another machine's. Integers are exact.
"""

from dataclasses import replace

import simde_py

from kernels.native.build import NativePath


def emulated(path: NativePath) -> NativePath:
    """The same kernels for any CPU with AVX2 and FMA. SIMDe redefines the intrinsics' names in all sources."""
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
