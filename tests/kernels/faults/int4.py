"""Faults of the GEMM with 4-bit weights."""

from tests.support.kernels.faults import Fault

_TESTS = "tests/kernels/gemm/test_int4_triton.py"

FAULTS = [
    Fault(
        name="both halves of a span have the scales of the first",
        path="kernels/gemm/int4/triton.py",
        old="(both >> 32).to(tl.uint32)",
        new="both.to(tl.uint32)",
        test=f"{_TESTS}::test_agrees_with_float64[66-130-200-dtype2-True]",
    ),
    Fault(
        name="zeros are minima",
        path="kernels/gemm/int4/triton.py",
        old="HAS_ZEROS=weight.has_zeros",
        new="HAS_ZEROS=False",
        test=f"{_TESTS}::test_agrees_with_float64[66-130-200-dtype2-True]",
    ),
]
