"""Faults of paged attention for GPUs."""

from tests.support.kernels.faults import Fault

_TESTS = "tests/kernels/attention/test_paged_triton.py"

FAULTS = [
    Fault(
        name="the first head's scale is everybody's",
        path="kernels/attention/triton_softmax.py",
        old="tl.load(scale + kv_head)",
        new="tl.load(scale)",
        test=f"{_TESTS}::test_options_agree_with_float64[a scale per head-False]",
    ),
    Fault(
        name="the diagonal is not masked",
        path="kernels/attention/triton_softmax.py",
        old="visible = distance >= 0",
        new="visible = distance >= -1",
        test=f"{_TESTS}::test_options_agree_with_float64[none-True]",
    ),
    Fault(
        name="the window is one token too long",
        path="kernels/attention/triton_softmax.py",
        old="visible & (distance < WINDOW)",
        new="visible & (distance <= WINDOW)",
        test=f"{_TESTS}::test_options_agree_with_float64[window-False]",
    ),
    Fault(
        name="chunks begin a token early",
        path="kernels/attention/triton_softmax.py",
        old="distance <= (lane_position % ATTENTION_CHUNK)",
        new="distance <= 1 + (lane_position % ATTENTION_CHUNK)",
        test=f"{_TESTS}::test_options_agree_with_float64[chunks-False]",
    ),
    Fault(
        name="a split row's partial sums begin at the next row's",
        path="kernels/attention/triton_reduce.py",
        old="first = (first_partial + query * num_chunks).to(tl.int64)",
        new="first = (first_partial + (query + 1) * num_chunks).to(tl.int64)",
        test=f"{_TESTS}::test_splitting_changes_no_bit",
    ),
    Fault(
        name="tables are looked up by the batch's row",
        path="kernels/attention/triton_softmax.py",
        old="row = tl.load(table_rows + row)",
        new="row = row + tl.load(table_rows + row) * 0",
        test=f"{_TESTS}::test_tables_of_permanent_rows_in_any_order[False]",
    ),
    Fault(
        name="odd columns are even ones of an e4m3 cache",
        path="kernels/attention/triton_softmax.py",
        old="odd_acc = dot(p, odd_v.to(p.dtype), odd_acc * shrink[:, None])",
        new="odd_acc = dot(p, even_v.to(p.dtype), odd_acc * shrink[:, None])",
        test=f"{_TESTS}::test_pairs_of_e4m3_and_single_numbers_agree_with_float64[64]",
    ),
    Fault(
        name="padding rows keep what a step before left",
        path="kernels/attention/triton_schedule.py",
        old="tl.store(line + row + 1, before + tl.cumsum(numbers, axis=0), mask=row < num_rows)",
        new="tl.store(line + row + 1, before + tl.cumsum(numbers, axis=0), mask=(row < num_rows) & (numbers > 0))",
        test=f"{_TESTS}::test_a_schedule_serves_step_after_step",
    ),
]
