"""Faults of fused elementwise kernels."""

from tests.support.faults import Fault

FAULTS = [
    Fault(
        name="a row is read beyond its end",
        path="kernels/rms_norm/gpu.py",
        old="x = widen(tl.load(x_TN + row * x_stride + columns, mask=mask, other=0.0))",
        new="x = widen(tl.load(x_TN + row * x_stride + columns, mask=columns < SIZE + 1, other=0.0))",
        test="tests/kernels/test_rms_norm_gpu.py::test_agrees_with_float64[dtype1-576]",
    ),
    Fault(
        name="scales of groups are stored by row",
        path="kernels/rms_norm/gpu.py",
        old="groups.to(tl.int64) * num_tokens + row, scale",
        new="row * ((SIZE + 127) // 128) + groups.to(tl.int64), scale",
        test="tests/kernels/test_rms_norm_gpu.py::test_quantized_by_group_is_the_norm_quantized[576-False]",
    ),
    Fault(
        name="the last id of a rank is the next one's first",
        path="kernels/embedding/gpu.py",
        old="(row < num_rows)",
        new="(row <= num_rows)",
        test="tests/kernels/test_embedding_gpu.py::test_gathers_its_rows_and_zeros[dtype1-576-id_dtype1]",
    ),
    Fault(
        name="values are turned as keys are",
        path="kernels/rope_cache_write/gpu.py",
        old="turned_second = tl.where(is_v, second, second * cos + first * sin)",
        new="turned_second = second * cos + first * sin",
        test="tests/kernels/test_rope_cache_write_gpu.py::test_is_rope_and_cache_write_in_one[False]",
    ),
    Fault(
        name="quantized before it is rounded",
        path="kernels/silu_mul/gpu.py",
        old="return widen(narrow(gate * sigmoid * up, gate_up.dtype.element_ty))",
        new="return gate * sigmoid * up",
        test="tests/kernels/test_silu_mul_gpu.py::test_quantized_by_group_is_the_product_quantized[1300-False-silu]",
    ),
]
