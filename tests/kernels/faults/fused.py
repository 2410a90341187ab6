"""Faults of fused elementwise kernels."""

from tests.support.kernels.faults import Fault

FAULTS = [
    Fault(
        name="a row is read beyond its end",
        path="kernels/elementwise/rms_norm/triton.py",
        old="x = widen(tl.load(x_TN + row * x_stride + columns, mask=mask, other=0.0))",
        new="x = widen(tl.load(x_TN + row * x_stride + columns, mask=columns < SIZE + 1, other=0.0))",
        test="tests/kernels/elementwise/test_rms_norm_triton.py::test_agrees_with_float64[dtype1-576]",
    ),
    Fault(
        name="scales of groups are stored by row",
        path="kernels/elementwise/rms_norm/triton.py",
        old="groups.to(tl.int64) * num_tokens + row, scale",
        new="row * ((SIZE + 127) // 128) + groups.to(tl.int64), scale",
        test="tests/kernels/elementwise/test_rms_norm_triton.py::test_quantized_by_group_is_the_norm_quantized[576-False]",
    ),
    Fault(
        name="the last id of a rank is the next one's first",
        path="kernels/elementwise/embedding/triton.py",
        old="(row < num_rows)",
        new="(row <= num_rows)",
        test="tests/kernels/elementwise/test_embedding_triton.py::test_gathers_its_rows_and_zeros[dtype1-576-id_dtype1]",
    ),
    Fault(
        name="values are turned as keys are",
        path="kernels/kv_cache/write/triton.py",
        old="turned_second = tl.where(is_v, second, second * cos + first * sin)",
        new="turned_second = second * cos + first * sin",
        test="tests/kernels/kv_cache/test_write_triton.py::test_is_rope_and_cache_write_in_one[False]",
    ),
    Fault(
        name="quantized before it is rounded",
        path="kernels/elementwise/silu_mul/triton.py",
        old="return widen(narrow(gated(gate, up, ACTIVATION), gate_up.dtype.element_ty))",
        new="return gated(gate, up, ACTIVATION)",
        test="tests/kernels/elementwise/test_silu_mul_triton.py::test_quantized_by_group_is_the_product_quantized[1300-False-silu]",
    ),
]
