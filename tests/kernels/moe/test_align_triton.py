"""kernels/moe_align: every pair is in exactly one row of a block of its expert, in order."""

import pytest
import torch

from kernels.moe.align.reference import align_reference
from kernels.moe.align.triton import CHUNK, STEP, align
from tests.support.gpu.gpu import DEVICE


def assert_aligned(experts_TK: torch.Tensor, num_experts: int, block_m: int) -> None:
    aligned = align(experts_TK.to(DEVICE), num_experts, block_m)
    expected = align_reference(experts_TK, num_experts, block_m)
    assert len(expected) <= len(aligned.block_experts_B)
    unused = len(aligned.block_experts_B) - len(expected)
    assert aligned.block_experts_B.tolist() == [expert for expert, _ in expected] + [-1] * unused
    rows = [pairs + [-1] * (block_m - len(pairs)) for _, pairs in expected] + [[-1] * block_m] * unused
    assert aligned.pairs_BM.view(-1, block_m).tolist() == rows


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "block_m"),
    # One pair; one expert; sizes that are no powers of two; more pairs than a chunk and than a step of chunk counts.
    [(1, 1, 1, 16), (3, 2, 5, 64), (37, 8, 40, 16), (CHUNK + 1, 1, 3, 128), (STEP * CHUNK + 1, 1, 7, 64)],
)
def test_agrees_with_the_reference(num_tokens: int, top_k: int, num_experts: int, block_m: int):
    generator = torch.Generator().manual_seed(num_tokens)
    experts_TK = torch.randint(-1, num_experts, (num_tokens, top_k), generator=generator, dtype=torch.int32)
    assert_aligned(experts_TK, num_experts, block_m)


@pytest.mark.parametrize("expert", [-1, 0, 3])
def test_all_pairs_may_be_one_expert_s_or_none_s(expert: int):
    assert_aligned(torch.full((40, 1), expert, dtype=torch.int32), 4, 16)


def test_there_are_blocks_enough_for_the_worst_distribution():
    # Each expert has one pair more than a full block.
    experts_TK = torch.arange(5, dtype=torch.int32).repeat(17)[:, None]
    assert_aligned(experts_TK, 5, 16)
