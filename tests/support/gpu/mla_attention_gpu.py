"""Steps of MLA for the GPU kernels, over caches that hold NaN wherever nothing may be read."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kernels.attention.latent import reference
from kernels.attention.latent.triton import LatentShape, MlaSchedule, mla_attention
from kernels.kv_cache.layout import mla_cache_shape
from tests.support.gpu.gpu import DEVICE, host_rows

SCALE = 0.2
# A table entry that must not be looked up: no cache has such a block.
NO_BLOCK = 1 << 30
# Tokens drawn for each row, whatever its length, so that a longer context begins like a shorter one.
MAX_CONTEXT = 512
_SMALL = LatentShape(num_heads=3, latent_size=64, rope_size=16)


@dataclass(frozen=True, kw_only=True)
class Step:
    """Rows of (queries, context). A row's numbers depend on its seed alone, so that steps can be cut and recombined."""

    rows: tuple[tuple[int, int], ...]
    seeds: tuple[int, ...] = ()
    shape: LatentShape = _SMALL
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    # The scale of an e4m3 cache.
    kv_scale: float | None = None
    queries_per_tile: int = 1
    chunk: int = 128
    num_programs: int = 3
    workspace_bytes: int = 1 << 20
    # Seed of the order in which blocks are given out.
    table_seed: int = 0
    # Block tables are in another order than the batch's rows, and `table_rows` maps to them.
    has_table_rows: bool = False

    def but(self, **changes: Any) -> "Step":
        return dataclasses.replace(self, **changes)

    @property
    def query_starts(self) -> np.ndarray:
        return np.cumsum([0, *(queries for queries, _ in self.rows)]).astype(np.int32)

    @property
    def context_lens(self) -> np.ndarray:
        return np.array([context for _, context in self.rows], dtype=np.int32)

    @property
    def cache_dtype(self) -> torch.dtype:
        return self.dtype if self.kv_scale is None else torch.float8_e4m3fn

    def block_tables(self) -> np.ndarray:
        """Block tables, with NO_BLOCK in entries that a row does not need."""
        counts = [-(-context // self.block_size) for _, context in self.rows]
        ids = np.random.default_rng(self.table_seed).permutation(np.arange(1, sum(counts) + 1))
        tables = np.full((len(self.rows), max(*counts, 1) + 1), NO_BLOCK, dtype=np.int32)
        for row, count in enumerate(counts):
            tables[row, :count], ids = ids[:count], ids[count:]
        return tables

    def queries(self) -> torch.Tensor:
        """[T, H, L + R]. A query depends on its position in the row."""
        parts = []
        for (queries, context), seed in zip(self.rows, self._seeds, strict=True):
            end = max(context, queries)
            drawn = _random(2 * seed, MAX_CONTEXT, self.shape.num_heads, self.shape.entry_size)
            parts.append(drawn[end - queries : end])
        return torch.cat(parts).to(self.dtype).to(DEVICE)

    def cache(self, tables: np.ndarray) -> torch.Tensor:
        num_blocks = 1 + sum(-(-context // self.block_size) for _, context in self.rows)
        size = mla_cache_shape(num_blocks=num_blocks, block_size=self.block_size, shape=self.shape)
        cache = torch.full(size, float("nan"))
        for row, ((_, context), seed) in enumerate(zip(self.rows, self._seeds, strict=True)):
            tokens = torch.arange(context)
            blocks = torch.from_numpy(tables[row].astype(np.int64))[tokens // self.block_size]
            cache[blocks, tokens % self.block_size] = _random(2 * seed + 1, MAX_CONTEXT, self.shape.entry_size)[
                :context
            ]
        return cache.to(self.cache_dtype).to(DEVICE)

    def schedule(self) -> MlaSchedule:
        return MlaSchedule(
            self.shape,
            max_num_seqs=len(self.rows),
            max_context_len=int(self.context_lens.max()),
            cache_dtype=self.cache_dtype,
            device=DEVICE,
            queries_per_tile=self.queries_per_tile,
            chunk=self.chunk,
            num_programs=self.num_programs,
            workspace_bytes=self.workspace_bytes,
        )

    def run(self, schedule: MlaSchedule | None = None) -> torch.Tensor:
        """The kernel's output, written to memory that held NaN."""
        tables = self.block_tables()
        query_starts, context_lens, block_tables = (
            torch.from_numpy(array).to(DEVICE) for array in (self.query_starts, self.context_lens, tables)
        )
        table_rows = None
        if self.has_table_rows:
            # The last row's table comes first; padding has none.
            table_rows = torch.where(
                context_lens > 0, torch.arange(len(self.rows) - 1, -1, -1, device=DEVICE), -1
            ).int()
            block_tables = block_tables.flip(0).contiguous()
        schedule = self.schedule() if schedule is None else schedule
        for memory in (schedule.partial_sums, schedule.partial_values, schedule.own_values):
            memory.fill_(float("nan"))
        schedule.update(query_starts, context_lens)
        q_THE = self.queries()
        out = q_THE.new_full((*q_THE.shape[:2], self.shape.latent_size), float("nan"))
        return mla_attention(
            q_THE,
            self.cache(tables),
            query_starts=query_starts,
            context_lens=context_lens,
            block_tables=block_tables,
            table_rows=table_rows,
            scale=SCALE,
            schedule=schedule,
            kv_scale=self.scale_tensor(),
            out=out,
            may_split=schedule.decodes_of(*host_rows(query_starts, context_lens))[1],
        )

    def scale_tensor(self) -> torch.Tensor | None:
        return None if self.kv_scale is None else torch.tensor([self.kv_scale], device=DEVICE)

    def expected(self) -> torch.Tensor:
        """The float64 reference, computed from the numbers as the cache holds them."""
        tables = self.block_tables()
        return reference.mla_attention(
            self.queries(),
            self.cache(tables),
            query_starts=self.query_starts,
            context_lens=self.context_lens,
            block_tables=tables,
            scale=SCALE,
            latent_size=self.shape.latent_size,
            kv_scale=self.scale_tensor(),
        )

    @property
    def _seeds(self) -> tuple[int, ...]:
        return self.seeds or tuple(range(1, len(self.rows) + 1))


def _random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
