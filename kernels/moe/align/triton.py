"""Alignment of (token, expert) pairs to blocks of one expert each, on a GPU.

T tokens, K experts of a token, N = T * K pairs, of which pair t * K + k is token t's k-th; E experts; B blocks of M
rows; C chunks of pairs.
"""

from dataclasses import dataclass

import torch
import triton.language as tl

from kernels.triton_common.integers import cdiv, next_power_of_2
from kernels.triton_common.jit import jit

# Pairs of one program: a decode batch of 256 tokens with 8 experts each has 8 chunks. Each program adds up the counts
# before its chunk itself, so there are two launches; for 32,768 pairs that reads 128 KiB of counts, from L2.
CHUNK = 256
# Pairs, blocks or chunks compared with all experts at once: with 256 experts 32 numbers a thread.
STEP = 32
NUM_WARPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignedPairs:
    """The pairs and the expert of each block of rows of a grouped GEMM."""

    block_m: int
    pairs_BM: torch.Tensor  # int32 [B * M]: a pair, or -1 for rows at the end of an expert's last block
    block_experts_B: torch.Tensor  # int32; -1 for empty blocks


def align(experts_TK: torch.Tensor, num_experts: int, block_m: int) -> AlignedPairs:
    """Sorts pairs by expert, keeping their order; each expert's pairs begin a new block of block_m rows.

    experts_TK: int32, contiguous, below num_experts. Pairs with a negative expert (another rank's, or padding) are left
    out. The number of blocks depends on shapes alone: the most that may be needed.
    """
    assert experts_TK.is_contiguous()
    num_pairs, device = experts_TK.numel(), experts_TK.device
    num_blocks = min(num_pairs, num_pairs // block_m + min(num_pairs, num_experts))
    pairs_BM = torch.empty(num_blocks * block_m, dtype=torch.int32, device=device)
    block_experts_B = torch.empty(num_blocks, dtype=torch.int32, device=device)
    if num_pairs:
        num_chunks = cdiv(num_pairs, CHUNK)
        block_e = next_power_of_2(num_experts)
        counts_CE = torch.empty(num_chunks, block_e, dtype=torch.int32, device=device)
        _count_kernel[(num_chunks,)](
            experts_TK,
            counts_CE,
            pairs_BM,
            num_pairs,
            pairs_BM.numel(),
            BLOCK_E=block_e,
            CHUNK=CHUNK,
            STEP=STEP,
            num_warps=NUM_WARPS,
        )
        _place_kernel[(num_chunks,)](
            experts_TK,
            counts_CE,
            pairs_BM,
            block_experts_B,
            num_pairs,
            num_blocks,
            BLOCK_M=block_m,
            BLOCK_E=block_e,
            CHUNK=CHUNK,
            STEP=STEP,
            num_warps=NUM_WARPS,
        )
    return AlignedPairs(block_m=block_m, pairs_BM=pairs_BM, block_experts_B=block_experts_B)


@jit
def _is_of(experts_TK, first, num_pairs, BLOCK_E: tl.constexpr, STEP: tl.constexpr):
    """Returns int32 [STEP, BLOCK_E], 1 where a pair has that expert, and the pairs' experts, -1 past the last pair."""
    pairs = first + tl.arange(0, STEP)
    experts = tl.load(experts_TK + pairs, mask=pairs < num_pairs, other=-1)
    return (experts[:, None] == tl.arange(0, BLOCK_E)[None]).to(tl.int32), experts


@jit(do_not_specialize=["num_pairs", "num_rows"])
def _count_kernel(
    experts_TK,
    counts_CE,
    pairs_BM,
    num_pairs,
    num_rows,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
):
    """Counts the pairs of each expert in each chunk, and fills pairs_BM with -1."""
    chunk = tl.program_id(0)
    counts = tl.zeros((BLOCK_E,), tl.int32)
    for start in range(0, CHUNK, STEP):
        is_of, _ = _is_of(experts_TK, chunk * CHUNK + start, num_pairs, BLOCK_E, STEP)
        counts += tl.sum(is_of, 0)
    tl.store(counts_CE + chunk * BLOCK_E + tl.arange(0, BLOCK_E), counts)
    share = tl.cdiv(num_rows, tl.num_programs(0))
    for start in range(0, share, CHUNK):
        i = start + tl.arange(0, CHUNK)
        tl.store(pairs_BM + chunk * share + i, -1, mask=(i < share) & (chunk * share + i < num_rows))


@jit(do_not_specialize=["num_pairs", "num_blocks"])
def _place_kernel(
    experts_TK,
    counts_CE,
    pairs_BM,
    block_experts_B,
    num_pairs,
    num_blocks,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
):
    chunk, num_chunks = tl.program_id(0), tl.num_programs(0)
    experts = tl.arange(0, BLOCK_E)
    counts = tl.zeros((BLOCK_E,), tl.int32)
    before = tl.zeros((BLOCK_E,), tl.int32)
    for start in range(0, num_chunks, STEP):
        chunks = start + tl.arange(0, STEP)
        of_chunks = tl.load(
            counts_CE + chunks[:, None] * BLOCK_E + experts[None], mask=(chunks < num_chunks)[:, None], other=0
        )
        counts += tl.sum(of_chunks, 0)
        before += tl.sum(tl.where((chunks < chunk)[:, None], of_chunks, 0), 0)
    rows = tl.cdiv(counts, BLOCK_M) * BLOCK_M
    ends = tl.cumsum(rows, 0)
    # The row of each expert's next pair.
    places = ends - rows + before
    for start in range(0, CHUNK, STEP):
        is_of, pair_experts = _is_of(experts_TK, chunk * CHUNK + start, num_pairs, BLOCK_E, STEP)
        # A pair's row follows the rows of its expert's earlier pairs.
        own_places = places[None] + tl.cumsum(is_of, 0) - is_of
        place = tl.sum(is_of * own_places, 1)
        pairs = chunk * CHUNK + start + tl.arange(0, STEP)
        tl.store(pairs_BM + place, pairs, mask=pair_experts >= 0)
        places += tl.sum(is_of, 0)
    share = tl.cdiv(num_blocks, num_chunks)
    for start in range(0, share, STEP):
        i = start + tl.arange(0, STEP)
        blocks = chunk * share + i
        # The first expert whose rows end after the block's begin.
        expert = tl.sum((ends[None] <= (blocks * BLOCK_M)[:, None]).to(tl.int32), 1)
        expert = tl.where(expert < BLOCK_E, expert, -1)
        tl.store(block_experts_B + blocks, expert, mask=(i < share) & (blocks < num_blocks))
