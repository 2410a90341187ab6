"""Decodes by paged attention on the head shape of Llama-3.1-8B, as questions vary them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.gpu.first_run.trees import state
from benchmarks.gpu.report import Missing

Make = Callable[[], Callable[[], torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class Decode:
    """One query of each of `batch` rows, all with contexts of `context` tokens."""

    batch: int
    context: int
    cache_dtype: torch.dtype
    device: str
    toy: bool
    block_size: int = 16
    # Tokens, stages, programs an SM; None: the choice of the kernel.
    tile: tuple[int, int, int] | None = None
    # Tokens of a chunk of v2; None: the kernel's.
    chunk: int | None = None
    # Memory of at least kv_bytes and a block for the cache, random already; None: the decode makes its own.
    memory: torch.Tensor | None = None

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, KV heads, head size."""
        return (4, 2, 64) if self.toy else (32, 8, 128)

    @property
    def kv_bytes(self) -> int:
        _, num_kv_heads, head_size = self.heads
        return 2 * self.batch * self.context * num_kv_heads * head_size * self.cache_dtype.itemsize

    def in_state(self, name: str) -> Make:
        """Makes the call with the kernels of a state of the sources (trees.py)."""
        return partial(self._make, name)

    def _make(self, name: str) -> Callable[[], torch.Tensor]:
        generator = torch.Generator(self.device).manual_seed(0)
        num_blocks = -(-self.context // self.block_size)
        with state(name) as load:
            layout, schedules = load("kernels.kv_cache.layout"), load("kernels.attention.triton_schedule")
            attention = load("kernels.attention.paged.triton").paged_attention
            num_heads, num_kv_heads, head_size = self.heads
            heads = layout.HeadShape(num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size)
            schedule = schedules.AttentionSchedule(
                heads,
                max_num_seqs=self.batch,
                max_context_len=self.context,
                cache_dtype=self.cache_dtype,
                device=self.device,
                **({} if self.chunk is None else {"chunk": self.chunk}),
            )
            if self.tile is not None:
                _set_tile(schedules, schedule, *self.tile)
            shape = layout.gpu_cache_shape(
                num_blocks=self.batch * num_blocks + 1,
                block_size=self.block_size,
                num_kv_heads=heads.num_kv_heads,
                head_size=heads.head_size,
            )
            q = torch.randn(self.batch, heads.num_heads, heads.head_size, generator=generator, device=self.device)
            q = q.bfloat16()
            cache = self._cache(shape, generator)
            tables = torch.randperm(self.batch * num_blocks, generator=generator, device=self.device) + 1
            tables = tables.view(self.batch, -1).int()
            starts = torch.arange(self.batch + 1, dtype=torch.int32, device=self.device)
            contexts = torch.full((self.batch,), self.context, dtype=torch.int32, device=self.device)
            one = q.new_ones(1, dtype=torch.float32) if self.cache_dtype is torch.float8_e4m3fn else None
            schedule.update(starts, contexts)
        return lambda: attention(
            q,
            cache,
            query_starts=starts,
            context_lens=contexts,
            block_tables=tables,
            scale=heads.head_size**-0.5,
            schedule=schedule,
            max_query_len=1,
            k_scale=one,
            v_scale=one,
        )

    def _cache(self, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        if self.memory is not None:
            return self.memory[: torch.Size(shape).numel()].view(shape)
        cache = torch.empty(shape, dtype=torch.bfloat16, device=self.device).normal_(generator=generator)
        return cache.to(self.cache_dtype)


def _set_tile(schedules: object, schedule: object, tokens: int, stages: int, programs: int) -> None:
    """Replaces the tile of a schedule's decodes, and starts as many programs as it allows for. Tiles that are given to
    the schedule would be for prefills, too. Raises Missing if this state makes tiles otherwise."""
    own = schedule.decode  # pyright: ignore[reportAttributeAccessIssue]
    try:
        tiles = schedules.Tiles(own.lanes, tokens, own.num_warps, stages, programs)  # pyright: ignore[reportAttributeAccessIssue]
    except TypeError as error:
        raise Missing(f"tiles are made otherwise: {error}") from error
    schedule.num_programs = schedule.num_programs // own.programs_per_sm * programs  # pyright: ignore[reportAttributeAccessIssue]
    schedule.decode = tiles  # pyright: ignore[reportAttributeAccessIssue]
