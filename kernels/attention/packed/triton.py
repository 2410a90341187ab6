"""Attention over packed sequences on a GPU: a program for each head of up to 64 queries of a sequence, which reads the
sequence's keys and values tile by tile.

Legend: T tokens, H heads, D head size.
"""

import numpy as np
import torch
import triton.language as tl

from kernels.attention.triton_softmax import LOG2E, NOTHING, attend_tile, load_lanes, normalized, store_lanes
from kernels.triton_common.integers import next_power_of_2
from kernels.triton_common.jit import jit

QUERIES, TOKENS = 64, 64
_NUM_STAGES = 2


class TritonPackedPlan:
    def __init__(self, starts: np.ndarray, device: torch.device) -> None:
        """starts: int32 [S + 1]."""
        tiles = [
            (first, query, end - first)
            for first, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
            for query in range(first, end, QUERIES)
        ]
        # int32 [tiles, 3]: the sequence's first token, the tile's first query, the sequence's number of tokens.
        self._tiles = torch.tensor(tiles, dtype=torch.int32).view(-1, 3).to(device)

    def attend(
        self, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, scale: float, out_THD: torch.Tensor
    ) -> torch.Tensor:
        """See PackedAttention."""
        _, num_heads, head_size = q_THD.shape
        padded = max(16, next_power_of_2(head_size))
        packed_attention_kernel[(len(self._tiles), num_heads)](
            q_THD,
            k_THD,
            v_THD,
            out_THD,
            self._tiles,
            q_THD.stride(0),
            k_THD.stride(0),
            v_THD.stride(0),
            out_THD.stride(0),
            scale * LOG2E.value,
            D=head_size,
            D_PADDED=padded,
            QUERIES=QUERIES,
            TOKENS=TOKENS,
            # With 4 warps, heads of 72 and 80 numbers spill 184 to 256 bytes on sm_80 and sm_89.
            num_warps=4 if padded <= 64 else 8,
            num_stages=_NUM_STAGES,
        )
        return out_THD


@jit
def packed_attention_kernel(
    q_THD,
    k_THD,
    v_THD,
    out_THD,
    tiles,
    q_stride,
    k_stride,
    v_stride,
    out_stride,
    factor,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    TOKENS: tl.constexpr,
):
    tile, head = tiles + 3 * tl.program_id(0), tl.program_id(1)
    first, first_query, length = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    lane, token = tl.arange(0, QUERIES), tl.arange(0, TOKENS)
    active = first_query + lane < first + length
    q = load_lanes(q_THD, first_query, lane, head, active, q_stride, D, D_PADDED)
    # To attend_tile, each query is the sequence's last token, which sees all others.
    position = tl.where(active, length - 1, -1)
    m, w = tl.full((QUERIES,), NOTHING, tl.float32), tl.zeros((QUERIES,), tl.float32)
    acc = tl.zeros((QUERIES, D_PADDED), tl.float32)
    whole = length // TOKENS * TOKENS
    for start in range(0, whole, TOKENS):
        everything = token < TOKENS
        k = load_lanes(k_THD, first + start, token, head, everything, k_stride, D, D_PADDED)
        v = load_lanes(v_THD, first + start, token, head, everything, v_stride, D, D_PADDED)
        m, w, acc = attend_tile(m, w, acc, q, k, v, start, position, factor, 0.0, 0, 0, TOKENS, False)
    if whole < length:
        rest = token < length - whole
        k = load_lanes(k_THD, first + whole, token, head, rest, k_stride, D, D_PADDED)
        v = load_lanes(v_THD, first + whole, token, head, rest, v_stride, D, D_PADDED)
        m, w, acc = attend_tile(m, w, acc, q, k, v, whole, position, factor, 0.0, 0, 0, TOKENS, True)
    store_lanes(out_THD, normalized(w, acc, 1.0), first_query, lane, head, active, out_stride, D, D_PADDED)
