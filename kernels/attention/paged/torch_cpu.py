"""Paged attention in PyTorch: decodes of similar length in groups, prompts in tiles of queries."""

import warnings
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from kernels.attention.plan import StepRows
from kernels.kv_cache.layout import HeadShape, KVScales

with warnings.catch_warnings():
    # torch warns once per process, at its first CSR tensor, that these are beta. Making one here silences the warning.
    warnings.simplefilter("ignore", UserWarning)
    torch.sparse_csr_tensor(torch.tensor([0, 0]), torch.empty(0, dtype=torch.int64), torch.empty(0), (1, 1))


class Scores(NamedTuple):
    """How a layer's scores become weights; see AttentionPlan.attend."""

    scale: float
    soft_cap: float
    sinks_H: torch.Tensor | None

    @property
    def are_plain(self) -> bool:
        return not self.soft_cap and self.sinks_H is None

    def cap_(self, scores: torch.Tensor) -> None:
        if self.soft_cap:
            scores.div_(self.soft_cap).tanh_().mul_(self.soft_cap)

    def softmax_with_sinks(self, scores_HL: torch.Tensor) -> torch.Tensor:
        """Returns the weights of keys; dim -2 is a head."""
        assert self.sinks_H is not None
        sinks = self.sinks_H.view(-1, 1).expand(*scores_HL.shape[:-1], 1)
        return torch.softmax(torch.cat((scores_HL, sinks), dim=-1), -1)[..., :-1]

    def attended(
        self, q_KGQD: torch.Tensor, k_KGLD: torch.Tensor, v_KGLD: torch.Tensor, mask_QL: torch.Tensor
    ) -> torch.Tensor:
        """Returns attention in q's dtype, computed in float32."""
        scores_KGQL = (q_KGQD.float() @ k_KGLD.float().transpose(-1, -2)).mul_(self.scale)
        self.cap_(scores_KGQL)
        scores_KGQL += mask_QL
        if self.sinks_H is None:
            weights_KGQL = torch.softmax(scores_KGQL, -1)
        else:
            of_heads = scores_KGQL.permute(2, 0, 1, 3).flatten(1, 2)
            weights_KGQL = self.softmax_with_sinks(of_heads).unflatten(1, scores_KGQL.shape[:2]).permute(1, 2, 0, 3)
        return (weights_KGQL @ v_KGLD.float()).to(q_KGQD.dtype)


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows that are computed together. The layers of a step share its buffers."""

    # int64 [R]: the rows' tokens on the step's token axis.
    token_indices_R: torch.Tensor
    # int64, the blocks to convert to float32 before they are read; None: the cache is read in place.
    converted_blocks: torch.Tensor | None
    # float32, -inf where a row must not attend.
    mask_R1L: torch.Tensor
    # CSR [R * H, table rows]; each layer overwrites its values.
    scores: torch.Tensor
    # int32 [C]: table rows of the keys; the values are num_kv_heads rows further.
    columns_C: torch.Tensor
    # int32 [R * H]: where each bag begins in columns_C.
    offsets: torch.Tensor

    @classmethod
    def build(
        cls,
        *,
        token_indices: np.ndarray,
        block_ids: torch.Tensor,
        hidden_before: np.ndarray,
        hidden_from: np.ndarray,
        block_size: int,
        cache_dtype: torch.dtype,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
    ) -> "DecodeGroup":
        """block_ids: int64 [R, blocks]. A row sees its tokens from hidden_before up to, but excluding, hidden_from."""
        convert = cache_dtype is not torch.float32
        num_rows, num_blocks = block_ids.shape
        length = num_blocks * block_size
        # A converted copy holds the blocks in reading order.
        places = torch.arange(block_ids.numel()).view(num_rows, num_blocks) if convert else block_ids
        tokens_R1L = (places[:, :, None] * block_size + torch.arange(block_size)).view(num_rows, 1, length)
        kv_heads_1H1 = torch.arange(num_heads).div(num_heads // num_kv_heads, rounding_mode="floor").view(1, -1, 1)
        columns_C = (tokens_R1L * (2 * num_kv_heads) + kv_heads_1H1).view(-1).int()
        row_starts = torch.arange(0, columns_C.numel() + 1, length, dtype=torch.int32)
        num_table_rows = (int(places.max()) + 1) * block_size * 2 * num_kv_heads
        positions_L = np.arange(length)
        hidden_RL = (positions_L < hidden_before[:, None]) | (positions_L >= hidden_from[:, None])
        return cls(
            token_indices_R=torch.from_numpy(token_indices.astype(np.int64)),
            converted_blocks=block_ids.view(-1) if convert else None,
            mask_R1L=torch.zeros(num_rows, 1, length).masked_fill_(torch.from_numpy(hidden_RL)[:, None], float("-inf")),
            scores=torch.sparse_csr_tensor(
                row_starts,
                columns_C,
                torch.zeros(columns_C.numel()),
                (num_rows * num_heads, num_table_rows),
                check_invariants=False,
            ),
            columns_C=columns_C,
            offsets=row_starts[:-1],
        )

    def attend(self, q_RHD: torch.Tensor, cache_NB2KD: torch.Tensor, scores: Scores) -> torch.Tensor:
        """Returns float32 [R, H, D] for float32 q."""
        num_rows, num_heads, head_size = q_RHD.shape
        num_kv_heads = cache_NB2KD.shape[3]
        if self.converted_blocks is not None:
            cache_NB2KD = cache_NB2KD.index_select(0, self.converted_blocks).float()
        table = cache_NB2KD.view(-1, head_size)[: self.scores.shape[1]]
        torch.sparse.sampled_addmm(
            self.scores, q_RHD.reshape(-1, head_size), table.t(), beta=0.0, alpha=scores.scale, out=self.scores
        )
        values = self.scores.values()
        scores.cap_(values)
        values.view(num_rows, num_heads, -1).add_(self.mask_R1L)
        scores_XL = values.view(num_rows * num_heads, -1)
        if scores.sinks_H is None:
            torch.softmax(scores_XL, -1, out=scores_XL)
        else:
            scores_XL.copy_(scores.softmax_with_sinks(scores_XL.view(num_rows, num_heads, -1)).flatten(0, 1))
        out, *_ = torch.embedding_bag(
            table[num_kv_heads:],
            self.columns_C,
            self.offsets,
            False,
            0,
            False,
            values,  # mode 0: sum
        )
        return out.view(num_rows, num_heads, head_size)


# Queries that share one call, which skips keys after the tile's last query and before its first query's window.
QUERIES_PER_TILE = 256


@dataclass(frozen=True, slots=True)
class QueryTile:
    # On the step's token axis.
    first_query: int
    num_queries: int
    # On the axis of the row's gathered keys.
    first_key: int
    num_keys: int
    # float32 [Q, L] for queries in reverse order; see PrefillRow.build.
    mask_QL: torch.Tensor


@dataclass(frozen=True, slots=True)
class PrefillRow:
    block_ids: torch.Tensor  # int64
    tiles: list[QueryTile]

    @classmethod
    def build(
        cls,
        *,
        first_query: int,
        num_queries: int,
        num_keys: int,
        block_ids: torch.Tensor,
        first_position: int,
        window: int,
        attention_chunk: int,
    ) -> "PrefillRow":
        """The queries are the last num_queries of the row's num_keys tokens in block_ids, the first of which is at
        first_position.

        The visibility of key j to query i depends on j - i alone, since a tile ends where a chunk of positions does.
        So, with queries in reverse order, the mask of every tile is a view of one vector, with stride 1 along both
        dims: no [Q, L] mask is ever stored.
        """
        offset = num_keys - num_queries
        # distances[d] belongs to a key that lies num_keys - d tokens before the query.
        distances = torch.arange(num_keys, -num_queries, -1)
        hidden = distances < 0
        if window:
            hidden |= distances >= window
        band = torch.zeros(distances.shape).masked_fill_(hidden, float("-inf"))
        tiles: list[QueryTile] = []
        start = 0
        while start < num_queries:
            stop = min(start + QUERIES_PER_TILE, num_queries)
            first_key = max(0, offset + start + 1 - window) if window else 0
            if attention_chunk:
                within = (first_position + offset + start) % attention_chunk
                stop = min(stop, start + attention_chunk - within)
                first_key = max(first_key, offset + start - within)
            length = offset + stop - first_key
            # Row 0 is query stop - 1, at token offset + stop - 1; its first key lies length - 1 before it.
            mask_QL = band.as_strided((stop - start, length), (1, 1), num_keys - (length - 1))
            tiles.append(QueryTile(first_query + start, stop - start, first_key, length, mask_QL))
            start = stop
        return cls(block_ids.view(-1), tiles)

    def attend(self, q_THD: torch.Tensor, cache_NB2KD: torch.Tensor, scores: Scores, out_THD: torch.Tensor) -> None:
        """Writes the row's outputs, in q's dtype, to its tokens of out_THD."""
        num_kv_heads = cache_NB2KD.shape[3]
        kv_L2KD = cache_NB2KD.index_select(0, self.block_ids).to(q_THD.dtype).flatten(0, 1)
        # KV heads take the batch dim, and each is expanded over its query heads without a copy.
        k_K1LD, v_K1LD = kv_L2KD.permute(1, 2, 0, 3).unsqueeze(2)
        for tile in self.tiles:
            queries = slice(tile.first_query, tile.first_query + tile.num_queries)
            keys = slice(tile.first_key, tile.first_key + tile.num_keys)
            q_KGQD = q_THD[queries].flip(0).unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
            k_KGLD, v_KGLD = (x[:, :, keys].expand(-1, q_KGQD.shape[1], -1, -1) for x in (k_K1LD, v_K1LD))
            if scores.are_plain:
                o_KGQD = F.scaled_dot_product_attention(
                    q_KGQD, k_KGLD, v_KGLD, attn_mask=tile.mask_QL.to(q_THD.dtype), scale=scores.scale
                )
            else:
                o_KGQD = scores.attended(q_KGQD, k_KGLD, v_KGLD, tile.mask_QL)
            out_THD[queries] = o_KGQD.permute(2, 0, 1, 3).flatten(1, 2).flip(0)


# All rows of a decode group are computed at the length of its longest. That is cheap, since padding reads block 0 again
# and again: 64 rows of 128 to 512 tokens take 125, 106, 101, 93, 93 and 92 ms in 16, 8, 6, 4, 2 groups and one
# (30 layers, float32, AVX2, 2 threads). The bound guards against one long row among many short ones.
PADDED_TOKENS_PER_GROUP = 4096
# A cache that needs conversion to float32 is converted one group at a time, so that a group's copy stays in L3: 64 rows
# of 193 tokens take 84, 78, 90 and 86 ms at 2048, 4096, 8192 and all tokens; read in place, 50.
CONVERTED_TOKENS_PER_GROUP = 4096


@dataclass(frozen=True, slots=True)
class TorchAttentionPlan:
    """One step's attention, for all layers that share one window and one attention chunk."""

    decode_groups: list[DecodeGroup]
    prefill_rows: list[PrefillRow]

    @classmethod
    def build(cls, step: StepRows, *, heads: HeadShape, window: int, attention_chunk: int) -> "TorchAttentionPlan":
        """heads, window, attention_chunk: as in `AttentionPlanner`."""
        query_starts, context_lens, block_tables, block_size, cache_dtype = step
        query_lens = np.diff(query_starts)
        positions = context_lens - query_lens  # each row's first query's
        first_tokens = np.maximum(positions + 1 - window, 0) if window else np.zeros_like(positions)
        if attention_chunk:
            first_tokens = np.maximum(first_tokens, positions // attention_chunk * attention_chunk)
        first_blocks = first_tokens // block_size
        lengths = context_lens - first_blocks * block_size  # tokens to read, from a block's start on

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
        soft_cap: float = 0.0,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See AttentionPlan. The result is always in new memory, never in `out`."""
        assert kv_scales is None
        scores = Scores(scale, soft_cap, sinks_H)
        if len(self.decode_groups) == 1 and not self.prefill_rows:
            return self.decode_groups[0].attend(q_THD.float(), cache, scores).to(q_THD.dtype)
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        for group in self.decode_groups:
            o_RHD = group.attend(q_THD[group.token_indices_R].float(), cache, scores)
            out_THD[group.token_indices_R] = o_RHD.to(q_THD.dtype)
        for row in self.prefill_rows:
            row.attend(q_THD, cache, scores, out_THD)
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
