"""Faults of multi-head latent attention and of writing its cache."""

from tests.support.kernels.faults import Fault

_TESTS = "tests/kernels/attention/test_latent_triton.py"

FAULTS = [
    Fault(
        name="a key is its latent alone",
        path="kernels/attention/latent/triton.py",
        old="s * factor + s_rope * factor",
        new="s * factor",
        test=f"{_TESTS}::test_dtypes_agree_with_float64[dtype0-same cache]",
    ),
    Fault(
        name="chunks are folded over the one before the last",
        path="kernels/attention/latent/triton.py",
        old="before = own + (chunk + 1) % 2",
        new="before = own + chunk % 2",
        test=f"{_TESTS}::test_splitting_changes_no_bit[dtype0]",
    ),
    Fault(
        name="columns of an e4m3 cache stay with the even ones first",
        path="kernels/attention/latent/triton.py",
        old="column = column % (LATENT // 2) * 2 + column // (LATENT // 2)",
        new="column = column + 0",
        test=f"{_TESTS}::test_an_e4m3_cache_folded_in_memory_and_split",
    ),
    Fault(
        name="the second group of heads has the first one's queries",
        path="kernels/attention/latent/triton.py",
        old="q_stride + lane_head * (LATENT + ROPE)",
        new="q_stride + lane_head % GROUP * (LATENT + ROPE)",
        test=f"{_TESTS}::test_groups_of_heads_on_wide_tiles[70]",
    ),
    Fault(
        name="entries are a latent apart",
        path="kernels/kv_cache/latent_write/triton.py",
        old="entry = cache_NBE + slot * (LATENT + ROPE)",
        new="entry = cache_NBE + slot * LATENT",
        test="tests/kernels/kv_cache/test_latent_write_triton.py::test_writes_its_slots_and_no_other[dtype0-cache_dtype0-small]",
    ),
]
