"""Faults of multi-head latent attention and of writing its cache."""

from tests.support.faults import Fault

_TESTS = "tests/kernels/test_mla_attention_gpu.py"

FAULTS = [
    Fault(
        name="a key is its latent alone",
        path="kernels/mla_attention/gpu_decode.py",
        old="s * factor + s_rope * factor",
        new="s * factor",
        test=f"{_TESTS}::test_dtypes_agree_with_float64[dtype0-same cache]",
    ),
    Fault(
        name="chunks are folded over the one before the last",
        path="kernels/mla_attention/gpu_decode.py",
        old="before = own + (chunk + 1) % 2",
        new="before = own + chunk % 2",
        test=f"{_TESTS}::test_splitting_changes_no_bit[dtype0]",
    ),
    Fault(
        name="the second group of heads has the first one's queries",
        path="kernels/mla_attention/gpu_decode.py",
        old="q_stride + lane_head * (LATENT + ROPE)",
        new="q_stride + lane_head % GROUP * (LATENT + ROPE)",
        test=f"{_TESTS}::test_groups_of_heads_on_wide_tiles[70]",
    ),
    Fault(
        name="entries are a latent apart",
        path="kernels/mla_cache_write/gpu.py",
        old="entry = cache_NBE + slot * (LATENT + ROPE)",
        new="entry = cache_NBE + slot * LATENT",
        test="tests/kernels/test_mla_cache_write_gpu.py::test_writes_its_slots_and_no_other[dtype0-cache_dtype0-small]",
    ),
]
