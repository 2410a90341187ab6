"""Faults of CUDA graphs."""

from tests.support.faults import Fault

FAULTS = [
    Fault(
        name="a piece holds attention by the plan of the step that it was captured with",
        path="worker/gpu/graphs/pieces.py",
        old="return self._device.between_graphs(attend)",
        new="return attend()",
        test="tests/models/test_gpu_pieces.py::test_steps_in_pieces_equal_steps_without_graphs_bit_for_bit",
    ),
    Fault(
        name="rows of padding are those of an earlier step",
        path="worker/gpu/engine.py",
        old="    arrays.rows_R[num_rows:size] = -1\n",
        new="",
        test="tests/models/test_gpu_graphs.py::test_steps_in_graphs_say_and_write_what_steps_without_do",
    ),
]
