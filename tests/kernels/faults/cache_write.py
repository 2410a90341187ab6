"""Faults of writing to and moving blocks of the KV cache."""

from tests.support.kernels.faults import Fault

_TESTS = "tests/kernels/kv_cache/test_write_triton.py::"

FAULTS = [
    Fault(
        name="padding rows are written to the null block",
        path="kernels/kv_cache/write/triton.py",
        old="slot = tl.load(slots_T + token + tl.arange(0, 1)[None]).to(tl.int64)",
        new="slot = tl.maximum(tl.load(slots_T + token + tl.arange(0, 1)[None]), 0).to(tl.int64)",
        test=f"{_TESTS}test_agrees_with_float64[dtype1-1-1-64-32-False-False]",
    ),
    Fault(
        name="slots are off by one",
        path="kernels/kv_cache/write/triton.py",
        old=") * BLOCK_SIZE + slot % BLOCK_SIZE",
        new=") * BLOCK_SIZE + (slot + 1) % BLOCK_SIZE",
        test=f"{_TESTS}test_agrees_with_float64[dtype1-1-1-64-32-False-False]",
    ),
    Fault(
        name="scale of the neighbouring head",
        path="kernels/kv_cache/write/triton.py",
        old="tl.load(scale_ptr + heads, mask",
        new="tl.load(scale_ptr + (heads + 1) % NUM_SCALES, mask",
        test=f"{_TESTS}test_quantizes_with_the_scales_of_keys_and_values[3-False]",
    ),
    Fault(
        name="runs are merged by their source alone",
        path="kernels/kv_cache/swap/torch_gpu.py",
        old="(source, target) == (last.source + last.num_blocks, last.target + last.num_blocks)",
        new="source == last.source + last.num_blocks",
        test="tests/kernels/kv_cache/test_swap_gpu.py::test_neighbours_on_both_sides_are_one_run[sources4-targets4-runs4]",
    ),
]
