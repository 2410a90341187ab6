"""Paged attention in PyTorch: which blocks each row reads, and what it may see of them, is settled once a step."""

from dataclasses import dataclass

import numpy as np
import torch

from kernels.paged_attention.decode import DecodeGroup
from kernels.paged_attention.heads import HeadShape
from kernels.paged_attention.kv_scales import KVScales
from kernels.paged_attention.prefill import PrefillRow

# Rows of one decode group are computed as if all were as long as its longest. That is cheap, for padding reads block 0
# again and again: 64 rows of 128 to 512 tokens take 125, 106, 101, 93, 93 and 92 ms in 16, 8, 6, 4, 2 groups and one
# (30 layers, float32, AVX2, 2 threads). The bound is there for one long row among many short ones.
PADDED_TOKENS_PER_GROUP = 4096
# A cache that must be converted to float32 is converted a group at a time, so that a group's copy stays in L3: 64 rows
# of 193 tokens take 84, 78, 90 and 86 ms at 2048, 4096, 8192 and all tokens; read in place, 50.
CONVERTED_TOKENS_PER_GROUP = 4096


@dataclass(frozen=True, slots=True)
class TorchAttentionPlan:
    """One step's attention, for all layers whose queries see equally far."""

    decode_groups: list[DecodeGroup]
    prefill_rows: list[PrefillRow]

    @classmethod
    def build(
        cls,
        *,
        query_starts: np.ndarray,
        context_lens: np.ndarray,
        block_tables: np.ndarray,
        block_size: int,
        cache_dtype: torch.dtype,
        heads: HeadShape,
        window: int = 0,
        attention_chunk: int = 0,
    ) -> "TorchAttentionPlan":
        """Arguments as of `AttentionPlanner`."""
        query_lens = np.diff(query_starts)
        positions = context_lens - query_lens  # of each row's first query
        first_tokens = np.maximum(positions + 1 - window, 0) if window else np.zeros_like(positions)
        if attention_chunk:
            first_tokens = np.maximum(first_tokens, positions // attention_chunk * attention_chunk)
        first_blocks = first_tokens // block_size
        lengths = context_lens - first_blocks * block_size  # of what is read: from a block's start on

        decode_rows = np.flatnonzero(query_lens == 1)
        groups = _group(decode_rows, lengths, block_size, convert=cache_dtype is not torch.float32)
        return cls(
            [
                DecodeGroup.build(
                    token_indices=query_starts[rows],
                    block_ids=_blocks_from(block_tables, rows, first_blocks, int(lengths[rows].max()), block_size),
                    hidden_before=(first_tokens - first_blocks * block_size)[rows],
                    hidden_from=lengths[rows],
                    block_size=block_size,
                    cache_dtype=cache_dtype,
                    num_heads=heads.num_heads,
                    num_kv_heads=heads.num_kv_heads,
                    head_size=heads.head_size,
                )
                for rows in groups
            ],
            [
                PrefillRow.build(
                    first_query=int(query_starts[row]),
                    num_queries=int(query_lens[row]),
                    num_keys=int(lengths[row]),
                    block_ids=_blocks_from(block_tables, np.array([row]), first_blocks, int(lengths[row]), block_size),
                    first_position=int(first_blocks[row]) * block_size,
                    window=window,
                    attention_chunk=attention_chunk,
                )
                for row in np.flatnonzero(query_lens > 1)
            ],
        )

    def attend(
        self,
        q_THD: torch.Tensor,
        cache: torch.Tensor,
        scale: float,
        out: torch.Tensor | None = None,
        kv_scales: KVScales | None = None,
    ) -> torch.Tensor:
        """The result is in memory of its own, never in `out`."""
        assert kv_scales is None
        if len(self.decode_groups) == 1 and not self.prefill_rows:
            return self.decode_groups[0].attend(q_THD.float(), cache, scale).to(q_THD.dtype)
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        for group in self.decode_groups:
            o_RHD = group.attend(q_THD[group.token_indices_R].float(), cache, scale)
            out_THD[group.token_indices_R] = o_RHD.to(q_THD.dtype)
        for row in self.prefill_rows:
            row.attend(q_THD, cache, scale, out_THD)
        return out_THD


def _group(rows: np.ndarray, lengths: np.ndarray, block_size: int, *, convert: bool) -> list[np.ndarray]:
    """Splits rows into groups of similar lengths; a single group keeps its order."""
    ordered = rows[np.argsort(-lengths[rows], kind="stable")]
    groups: list[list[int]] = []
    padded = width = 0
    for row in ordered:
        length = int(lengths[row])
        padded += width - length
        too_many = convert and groups and (len(groups[-1]) + 1) * width > CONVERTED_TOKENS_PER_GROUP
        if not groups or too_many or padded > PADDED_TOKENS_PER_GROUP:
            groups.append([])
            width, padded = -(-length // block_size) * block_size, 0
        groups[-1].append(row)
    return [rows] if len(groups) == 1 else [np.array(group) for group in groups]


def _blocks_from(
    block_tables: np.ndarray, rows: np.ndarray, first_blocks: np.ndarray, longest: int, block_size: int
) -> torch.Tensor:
    """int64 [rows, blocks of the longest]: each row's blocks from its first visible one on, padded with block 0."""
    wanted = first_blocks[rows, None] + np.arange(-(-longest // block_size))
    inside = wanted < block_tables.shape[1]
    ids = block_tables[rows[:, None], np.where(inside, wanted, 0)]
    return torch.from_numpy(np.where(inside, ids, 0).astype(np.int64))
