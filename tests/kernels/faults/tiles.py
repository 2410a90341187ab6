"""Faults of kernels.triton_common."""

from tests.support.kernels.faults import Fault

FAULTS = [
    Fault(
        name="ties of e4m3 round up",
        path="kernels/triton_common/numbers.py",
        old="size_bits + 0x7FFFF + ((size_bits >> 20) & 1)",
        new="size_bits + 0x80000",
        test="tests/kernels/test_triton_common.py::test_narrow_to_e4m3_rounds_and_saturates[True]",
    ),
]
