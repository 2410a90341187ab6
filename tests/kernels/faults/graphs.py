"""Faults of CUDA graphs."""

from tests.support.faults import Fault

FAULTS = [
    Fault(
        name="a piece holds attention by the plan of the step that it was captured with",
        path="worker/gpu/pieces.py",
        old="return self._device.between_graphs(attend)",
        new="return attend()",
        test="tests/models/test_gpu_pieces.py::test_steps_in_pieces_equal_steps_without_graphs_bit_for_bit",
    ),
]
