"""Faults of CUDA graphs."""

from tests.support.kernels.faults import Fault

FAULTS = [
    Fault(
        name="a piece holds attention by the plan of the step that it was captured with",
        path="worker/gpu/executor.py",
        old="return self._device.between_graphs(attend)",
        new="return attend()",
        test="tests/worker/gpu_models/test_piecewise_graphs.py::test_steps_in_pieces_equal_steps_without_graphs_bit_for_bit",
    ),
    Fault(
        # Row 0, because stale memory may hold any number, and the interpreter would then read anywhere.
        name="rows of padding are those of a request",
        path="worker/gpu/inputs.py",
        old="    arrays.rows_R[num_rows:size] = -1\n",
        new="    arrays.rows_R[num_rows:size] = 0\n",
        test="tests/worker/gpu_models/test_graphs.py::test_steps_in_graphs_say_and_write_what_steps_without_do",
    ),
]
