"""Faults in a step's batch."""

from tests.support.kernels.faults import Fault

_PATH = "kernels/step_inputs/triton.py"
_TESTS = "tests/kernels/test_step_inputs_triton.py"

FAULTS = [
    Fault(
        name="positions off by one",
        path=_PATH,
        old="- (end - t)",
        new="- (end - t) + 1",
        test=f"{_TESTS}::test_a_decode_is_the_last_token_of_its_context",
    ),
    Fault(
        name="a stale row of padding",
        path=_PATH,
        old="    real = row >= 0\n    end =",
        new="    real = there & (low < num_rows)\n    end =",
        test=f"{_TESTS}::test_padding_has_no_token_no_position_and_no_slot",
    ),
    Fault(
        name="the table of the place in the batch",
        path=_PATH,
        old="place = row.to(tl.int64) * table_size",
        new="place = low.to(tl.int64) * table_size",
        test=f"{_TESTS}::test_a_chunk_ends_with_its_context",
    ),
]
