"""Faults of linear layers in e4m3."""

from tests.support.kernels.faults import Fault

_TESTS = "tests/kernels/linear/test_triton_fp8.py::"

FAULTS = [
    Fault(
        name="all channels get the scale of the first",
        path="kernels/linear/weights.py",
        old="return weight.scales.expand(num_outputs, 1)",
        new="return weight.scales[:1].expand(num_outputs, 1)",
        test=f"{_TESTS}test_parts_keep_their_own_scales[layouts1-outputs1-130-channel]",
    ),
    Fault(
        name="blocks of a part go on in the next one",
        path="kernels/linear/weights.py",
        old="len(weight.values_OI) % BLOCK == 0",
        new="len(weight.values_OI) >= 0",
        test=f"{_TESTS}test_parts_without_a_common_layout_are_quantized_anew_from_floats",
    ),
]
