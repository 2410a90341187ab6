"""MLA in PyTorch on a CPU, row by row.

Legend: T tokens, H heads, L latent size, D numbers of an entry, C tokens of a row's context, Q queries of a tile.
"""

from dataclasses import dataclass

import numpy as np
import torch

from kernels.attention.plan import StepRows
from kernels.kv_cache.layout import KVScales, LatentShape

# Scores per tile: at most 16 MiB of float32.
_SCORES_PER_TILE = 4 << 20


@dataclass(frozen=True, slots=True)
class _Row:
    """A row: the step's tokens first_token : end_token are the last of its context_len tokens, stored in block_ids."""

    first_token: int
    end_token: int
    context_len: int
    block_ids: torch.Tensor  # int64


class TorchMlaPlan:
    """The MLA plan of one step."""

    def __init__(self, shape: LatentShape, step: StepRows) -> None:
        query_starts, context_lens, block_tables, block_size, _ = step
        self._shape = shape
        self._rows = [
            _Row(
                int(query_starts[row]),
                int(query_starts[row + 1]),
                int(context_lens[row]),
                torch.from_numpy(block_tables[row, : -(-int(context_lens[row]) // block_size)].astype(np.int64)),
            )
            for row in range(len(context_lens))
        ]

    def attend(
        self,
        q_THD: torch.Tensor,
        cache: torch.Tensor,
        scale: float,
        out: torch.Tensor | None = None,
        kv_scales: KVScales | None = None,
        soft_cap: float = 0.0,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """softmax(scale * q . (latent | rope)) @ latent of each query over its row's context, [T, H, L] in q's dtype;
        softmax and sums are float32."""
        assert kv_scales is None
        assert not soft_cap
        assert sinks_H is None
        shape = self._shape
        size = (len(q_THD), shape.num_heads, shape.latent_size)
        out_THL = q_THD.new_empty(size) if out is None else out
        for row in self._rows:
            entries_CD = cache.index_select(0, row.block_ids).flatten(0, 1)[: row.context_len].float()
            step = max(1, _SCORES_PER_TILE // (row.context_len * shape.num_heads))
            for first in range(row.first_token, row.end_token, step):
                end = min(first + step, row.end_token)
                visible = entries_CD[: row.context_len - (row.end_token - end)]
                out_THL[first:end] = _attend(q_THD[first:end].float(), visible, scale, shape.latent_size)
        return out_THL


def _attend(q_QHD: torch.Tensor, entries_CD: torch.Tensor, scale: float, latent_size: int) -> torch.Tensor:
    """Returns float32 [Q, H, L]. The queries are the last Q of the C tokens."""
    num_queries, context_len = len(q_QHD), len(entries_CD)
    scores_QHC = (q_QHD.flatten(0, 1) @ entries_CD.T).mul_(scale).unflatten(0, (num_queries, -1))
    is_later_QC = torch.ones(num_queries, context_len, dtype=torch.bool).triu_(context_len - num_queries + 1)
    weights_QHC = scores_QHC.masked_fill_(is_later_QC[:, None], float("-inf")).softmax(dim=2)
    return (weights_QHC.flatten(0, 1) @ entries_CD[:, :latent_size]).unflatten(0, (num_queries, -1))
