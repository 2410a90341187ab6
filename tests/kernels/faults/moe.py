"""Faults in mixtures of experts."""

from tests.support.kernels.faults import Fault

FAULTS = [
    Fault(
        name="the bias is part of the weights",
        path="kernels/moe/routing/triton.py",
        old="tl.where(is_best, scores, 0.0)",
        new="tl.where(is_best, wanted, 0.0)",
        test="tests/kernels/moe/test_routing_triton.py::test_agrees_with_the_reference[deepseek-v3]",
    ),
    Fault(
        name="a chunk's own pairs count as those before it",
        path="kernels/moe/align/triton.py",
        old="(chunks < chunk)[:, None]",
        new="(chunks <= chunk)[:, None]",
        test="tests/kernels/moe/test_align_triton.py::test_agrees_with_the_reference[37-8-40-16]",
    ),
    Fault(
        name="up has the gate's scales",
        path="kernels/moe/gemm/triton.py",
        old="tl.load(w_scale + up_scale_rows + group)",
        new="tl.load(w_scale + group)",
        test="tests/kernels/moe/test_gemm_triton.py::test_block_fp8_agrees_with_the_reference[few]",
    ),
    Fault(
        name="up has the gate's biases",
        path="kernels/moe/gemm/triton.py",
        old="tl.load(bias_of_expert + N)",
        new="tl.load(bias_of_expert)",
        test="tests/kernels/moe/test_gemm_triton.py::test_biases_and_a_clamped_activation_agree_with_the_reference[tile0]",
    ),
    Fault(
        name="stale rows of another rank's pairs are read",
        path="kernels/moe/gemm/triton.py",
        old="end = tl.where(is_here, hidden_size, 0)",
        new="end = hidden_size",
        test="tests/kernels/moe/test_gemm_triton.py::test_padding_and_other_ranks_pairs_add_nothing",
    ),
]
