"""Faults of writing to and moving blocks of the KV cache."""

from tests.support.faults import Fault

_TESTS = "tests/kernels/test_cache_write_gpu.py::"

FAULTS = [
    Fault(
        name="padding rows are written to the null block",
        path="kernels/cache_write/gpu.py",
        old="slot = tl.load(slots_T + token, mask=token < num_tokens, other=-1).to(tl.int64)",
        new="slot = tl.maximum(tl.load(slots_T + token, mask=token < num_tokens, other=-1), 0).to(tl.int64)",
        test=f"{_TESTS}test_writes_its_slots_and_no_other[dtype1-2-256-32]",
    ),
    Fault(
        name="slots are off by one",
        path="kernels/cache_write/gpu.py",
        old="head * BLOCK_SIZE + slot % BLOCK_SIZE",
        new="head * BLOCK_SIZE + (slot + 1) % BLOCK_SIZE",
        test=f"{_TESTS}test_rows_beyond_the_slots_are_not_written",
    ),
    Fault(
        name="scale of the neighbouring head",
        path="kernels/cache_write/gpu.py",
        old="tl.load(scale_ptr + heads, mask",
        new="tl.load(scale_ptr + (heads + 1) % NUM_SCALES, mask",
        test=f"{_TESTS}test_quantizes_with_the_scales_of_keys_and_values[True-False]",
    ),
    Fault(
        name="runs are merged by their source alone",
        path="kernels/block_swap/runs.py",
        old="(source, target) == (last.source + last.num_blocks, last.target + last.num_blocks)",
        new="source == last.source + last.num_blocks",
        test="tests/kernels/test_block_swap.py::test_neighbours_on_both_sides_are_one_run[sources4-targets4-runs4]",
    ),
]
