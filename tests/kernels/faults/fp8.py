"""Faults of quantizing to and multiplying e4m3."""

from tests.support.kernels.faults import Fault

_QUANTIZE = "tests/kernels/gemm/test_quantize_triton.py::"
_GEMM = "tests/kernels/gemm/test_fp8_triton.py::"

FAULTS = [
    Fault(
        name="scales of groups are stored by row",
        path="kernels/gemm/quantize/triton.py",
        old="scales + group.to(tl.int64) * num_rows + row",
        new="scales + row * tl.num_programs(1) + group",
        test=f"{_QUANTIZE}test_bits_are_those_of_the_formula[shape3-dtype0-groups]",
    ),
    Fault(
        name="scales of the step before",
        path="kernels/gemm/fp8/triton.py",
        old="tl.minimum(step + 1, last - 1) * BLOCK_K // 128",
        new="step * BLOCK_K // 128",
        test=f"{_GEMM}test_is_the_formula[shape3-block]",
    ),
    Fault(
        name="the weight's blocks are twice as wide",
        path="kernels/gemm/fp8/triton.py",
        old="(tile_n * BLOCK_N // 128) * w_scale_row_stride",
        new="(tile_n * BLOCK_N // 256) * w_scale_row_stride",
        test=f"{_GEMM}test_is_the_formula[shape3-block]",
    ),
    Fault(
        name="the last step of K has no mask",
        path="kernels/gemm/fp8/triton.py",
        old="EVEN_K=K % tile.block_k == 0",
        new="EVEN_K=True",
        test=f"{_GEMM}test_only_its_own_memory[block-1]",
    ),
    Fault(
        name="one padding row is written",
        path="kernels/gemm/fp8/triton.py",
        old="mask=has_row[:, None] & (column",
        new="mask=(row < M + 1)[:, None] & (column",
        test=f"{_GEMM}test_only_its_own_memory[channel-1]",
    ),
    Fault(
        name="rows beyond M read row 0",
        path="kernels/gemm/fp8/triton.py",
        old="tl.load(x_tile, mask=has_row[:, None], other=0.0), tl.load(w_tile)",
        new="tl.load(x_tile - (row - row % M).to(tl.int64)[:, None] * x_stride), tl.load(w_tile)",
        test=f"{_GEMM}test_rows_of_padding_read_nothing[channel-256]",
    ),
]
