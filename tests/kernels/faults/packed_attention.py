"""Faults of attention over packed sequences."""

from tests.support.kernels.faults import Fault

_TEST = "tests/kernels/attention/test_packed_triton.py::test_agrees_with_float64[dtype0-2-24]"

FAULTS = [
    Fault(
        name="a sequence's last tile also sees what follows it",
        path="kernels/attention/packed/triton.py",
        old="whole, position, factor, 0.0, 0, 0, TOKENS, True)",
        new="whole, position, factor, 0.0, 0, 0, TOKENS, False)",
        test=_TEST,
    ),
    Fault(
        name="keys are those of the first sequence",
        path="kernels/attention/packed/triton.py",
        old="k = load_lanes(k_THD, first + whole,",
        new="k = load_lanes(k_THD, whole,",
        test=_TEST,
    ),
]
