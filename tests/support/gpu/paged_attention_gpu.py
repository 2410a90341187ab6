"""Steps of paged attention for the GPU kernels, over caches that hold NaN wherever nothing may be read."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kernels.attention.paged import reference
from kernels.attention.paged.triton import AttentionSchedule, paged_attention
from kernels.kv_cache.layout import HeadShape, gpu_cache_shape
from tests.support.gpu.gpu import DEVICE, host_rows

SCALE = 0.2
# A table entry that must not be looked up: no cache has such a block.
NO_BLOCK = 1 << 30
# Tokens drawn for each row, whatever its length, so that a longer context begins like a shorter one.
MAX_CONTEXT = 1024


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of an attention layer; `Step` makes the tensors."""

    window: int = 0
    attention_chunk: int = 0
    soft_cap: float = 0.0
    sinks: bool = False
    # Entries of k_scale and of v_scale; the cache is e4m3 if there are any.
    num_scales: int = 0


@dataclass(frozen=True, kw_only=True)
class Step:
    """Rows of (queries, context). A row's numbers depend on its seed alone, so that steps can be cut and recombined."""

    rows: tuple[tuple[int, int], ...]
    seeds: tuple[int, ...] = ()
    heads: HeadShape = field(default_factory=lambda: HeadShape(num_heads=4, num_kv_heads=2, head_size=64))
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    options: Options = Options()
    batch_invariant: bool = False
    most_queries: int = 1
    # Decodes read an e4m3 cache by pairs.
    pairs: bool = True
    chunk: int = 128
    num_programs: int = 3
    workspace_bytes: int = 1 << 20
    # Seed of the order in which blocks are given out.
    table_seed: int = 0

    def but(self, **changes: Any) -> "Step":
        return dataclasses.replace(self, **changes)

    @property
    def query_starts(self) -> np.ndarray:
        return np.cumsum([0, *(queries for queries, _ in self.rows)]).astype(np.int32)

    @property
    def context_lens(self) -> np.ndarray:
        return np.array([context for _, context in self.rows], dtype=np.int32)

    def block_tables(self) -> np.ndarray:
        """Block tables, with NO_BLOCK in entries that a row does not need, or that its first query can't see."""
        counts = [-(-context // self.block_size) for _, context in self.rows]
        ids = np.random.default_rng(self.table_seed).permutation(np.arange(1, sum(counts) + 1))
        tables = np.full((len(self.rows), max(*counts, 1) + 1), NO_BLOCK, dtype=np.int32)
        for row, count in enumerate(counts):
            tables[row, :count], ids = ids[:count], ids[count:]
            queries, context = self.rows[row]
            if self.options.window:
                tables[row, : max(0, context - queries + 1 - self.options.window) // self.block_size] = NO_BLOCK
            if self.options.attention_chunk:
                position = max(0, context - queries)
                tables[row, : (position - position % self.options.attention_chunk) // self.block_size] = NO_BLOCK
        return tables

    def queries(self) -> torch.Tensor:
        """[T, H, D]. A query depends on its position in the row."""
        parts = []
        for (queries, context), seed in zip(self.rows, self._seeds, strict=True):
            end = max(context, queries)
            parts.append(
                _random(2 * seed, MAX_CONTEXT, self.heads.num_heads, self.heads.head_size)[end - queries : end]
            )
        return torch.cat(parts).to(self.dtype).to(DEVICE)

    def cache(self, tables: np.ndarray) -> torch.Tensor:
        num_blocks = 1 + sum(-(-context // self.block_size) for _, context in self.rows)
        shape = gpu_cache_shape(
            num_blocks=num_blocks,
            block_size=self.block_size,
            num_kv_heads=self.heads.num_kv_heads,
            head_size=self.heads.head_size,
        )
        cache = torch.full(shape, float("nan"))
        for row, ((_, context), seed) in enumerate(zip(self.rows, self._seeds, strict=True)):
            kv_L2KD = _random(2 * seed + 1, MAX_CONTEXT, 2, self.heads.num_kv_heads, self.heads.head_size)
            for token in range(context):
                block = tables[row, token // self.block_size]
                if block != NO_BLOCK:
                    cache[block, :, :, token % self.block_size] = kv_L2KD[token]
        return cache.to(self._cache_dtype).to(DEVICE)

    def layer(self) -> dict[str, Any]:
        """The arguments that belong to a layer."""
        num_heads, scales = self.heads.num_heads, self.options.num_scales
        return {
            "sinks": _random(901, num_heads).to(DEVICE) if self.options.sinks else None,
            "k_scale": (_random(903, scales).abs() + 0.5).to(DEVICE) if scales else None,
            "v_scale": (_random(904, scales).abs() + 0.5).to(DEVICE) if scales else None,
        }

    def schedule(self) -> AttentionSchedule:
        return AttentionSchedule(
            self.heads,
            max_num_seqs=len(self.rows),
            max_context_len=int(self.context_lens.max()),
            cache_dtype=self._cache_dtype,
            device=DEVICE,
            window=self.options.window,
            attention_chunk=self.options.attention_chunk,
            batch_invariant=self.batch_invariant,
            most_queries=self.most_queries,
            pairs=self.pairs,
            chunk=self.chunk,
            num_programs=self.num_programs,
            workspace_bytes=self.workspace_bytes,
        )

    def run(self, schedule: AttentionSchedule | None = None) -> torch.Tensor:
        """The kernel's output, written to memory that held NaN."""
        tables = self.block_tables()
        query_starts, context_lens, block_tables = (
            torch.from_numpy(array).to(DEVICE) for array in (self.query_starts, self.context_lens, tables)
        )
        schedule = self.schedule() if schedule is None else schedule
        schedule.partial_sums.fill_(float("nan"))
        schedule.partial_values.fill_(float("nan"))
        schedule.update(query_starts, context_lens)
        has_decodes, may_split = schedule.decodes_of(*host_rows(query_starts, context_lens))
        q_THD = self.queries()
        return paged_attention(
            q_THD,
            self.cache(tables),
            query_starts=query_starts,
            context_lens=context_lens,
            block_tables=block_tables,
            scale=SCALE,
            schedule=schedule,
            soft_cap=self.options.soft_cap,
            has_decodes=has_decodes,
            may_split=may_split,
            out=torch.full_like(q_THD, float("nan")),
            **self.layer(),
        )

    def expected(self) -> torch.Tensor:
        """The float64 reference, computed from the numbers as the cache holds them."""
        tables = self.block_tables()
        return reference.paged_attention(
            self.queries(),
            self.cache(tables).permute(0, 3, 1, 2, 4),
            query_starts=self.query_starts,
            context_lens=self.context_lens,
            block_tables=tables,
            scale=SCALE,
            window=self.options.window,
            attention_chunk=self.options.attention_chunk,
            soft_cap=self.options.soft_cap,
            **self.layer(),
        )

    @property
    def _seeds(self) -> tuple[int, ...]:
        return self.seeds or tuple(range(1, len(self.rows) + 1))

    @property
    def _cache_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.options.num_scales else self.dtype


def _random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
