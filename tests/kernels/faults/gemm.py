"""Faults of the batch-invariant GEMM."""

from tests.support.kernels.faults import Fault

_TESTS = "tests/kernels/gemm/test_dense_triton.py"

FAULTS = [
    Fault(
        name="each part of K has the bias",
        path="kernels/gemm/dense/triton.py",
        old="None if split else bias_N",
        new="bias_N",
        test=f"{_TESTS}::test_agrees_with_float64[3-5-1096-dtype0-out_dtype0-True]",
    ),
    Fault(
        name="large batches have steps of their own",
        path="kernels/gemm/dense/triton.py",
        old="MANY = GemmTile(block_m=128,",
        new="MANY = GemmTile(block_m=128, block_k=32,",
        test=f"{_TESTS}::test_a_row_does_not_depend_on_its_batch[dtype0-140-200]",
    ),
]
