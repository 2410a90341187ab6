"""Attention of one row with several queries: a prompt, or a chunk of one, over what the cache holds of the row.

Legend: Q queries of a tile, L keys, H heads, K KV heads, G heads of a KV head, D head size, N blocks, B tokens of a
block.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

# Queries that share one call: keys after the tile's last query, or before its window, are not computed.
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

        Whether key j is visible to query i depends on j - i alone, for a tile ends where a chunk of positions does.
        With the queries in reverse order, the mask of every tile is therefore a view of one vector, with stride 1 along
        both dims: no [Q, L] mask is ever stored.
        """
        offset = num_keys - num_queries
        # distance[d] is for a key that lies num_keys - d tokens before the query.
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

    def attend(self, q_THD: torch.Tensor, cache_NB2KD: torch.Tensor, scale: float, out_THD: torch.Tensor) -> None:
        """Writes the row's outputs, in q's dtype, to its tokens of out_THD."""
        num_kv_heads = cache_NB2KD.shape[3]
        kv_L2KD = cache_NB2KD.index_select(0, self.block_ids).to(q_THD.dtype).flatten(0, 1)
        # KV heads take the batch dim and each is expanded over its query heads, so that none is copied.
        k_K1LD, v_K1LD = kv_L2KD.permute(1, 2, 0, 3).unsqueeze(2)
        for tile in self.tiles:
            queries = slice(tile.first_query, tile.first_query + tile.num_queries)
            keys = slice(tile.first_key, tile.first_key + tile.num_keys)
            q_KGQD = q_THD[queries].flip(0).unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
            k_KGLD, v_KGLD = (x[:, :, keys].expand(-1, q_KGQD.shape[1], -1, -1) for x in (k_K1LD, v_K1LD))
            o_KGQD = F.scaled_dot_product_attention(
                q_KGQD, k_KGLD, v_KGLD, attn_mask=tile.mask_QL.to(q_THD.dtype), scale=scale
            )
            out_THD[queries] = o_KGQD.permute(2, 0, 1, 3).flatten(1, 2).flip(0)
