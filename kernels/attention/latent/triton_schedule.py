"""Tile sizes and schedule of MLA, which computes all rows as decodes."""

import torch

from kernels.attention.triton_schedule import WORKSPACE_BYTES, AttentionSchedule, Tiles, tile_arch
from kernels.kv_cache.layout import HeadShape, LatentShape

# The least that a tensor core takes, and of Hopper's wgmma. Between the two there is nothing to be had: without wgmma
# each warp holds all queries in registers, and 32 lanes of 576 numbers leave none.
NARROW_LANES, WIDE_LANES = 16, 64
# Tokens of a chunk, whose sums are 2 KiB a head: 16 heads add a ninth to the bytes of its entries, once written and
# once read. 64 heads are bound by tensor cores; the end of a chunk, 128 KiB out of registers while nothing is
# multiplied, is about a fifth of the time of 1,024 tokens.
NARROW_CHUNK, WIDE_CHUNK = 512, 1024


def head_groups(shape: LatentShape, lanes: int) -> HeadShape:
    """Heads as programs take them, as many as there are lanes; each group reads the entries for itself, all but the
    first from L2."""
    num_groups = next(
        n for n in range(1, shape.num_heads + 1) if n * lanes >= shape.num_heads and shape.num_heads % n == 0
    )
    return HeadShape(num_heads=shape.num_heads, num_kv_heads=num_groups, head_size=shape.latent_size)


def mla_tiles(shape: LatentShape, cache_dtype: torch.dtype, arch: int, *, queries_per_tile: int = 1) -> Tiles:
    """queries_per_tile: of a row, which read its entries together where the lanes suffice."""
    size = cache_dtype.itemsize
    if size == 4:
        # For models of tests: products without tensor cores.
        return Tiles(NARROW_LANES, 32, 4, 1, 1)
    # Without wgmma Triton would not load e4m3 ahead of time, since its two products want it in different orders.
    if arch == 90 and (shape.num_heads * queries_per_tile > NARROW_LANES or size == 1):
        # Queries take 72 KiB of shared memory, two tiles of 64 tokens 144, weights 8: all that there is. Of e4m3 there
        # is a copy of 16 bits, for wgmma. Two warp groups hold the sums, half of the latent each, as FlashMLA has it.
        return Tiles(WIDE_LANES, 64, 8, 3, 1)
    if size == 1:
        return Tiles(NARROW_LANES, 64, 8, 3, 1)
    # 36 KiB of entries a tile, of which two are in flight or multiplied in each of two programs on an SM of Hopper: an
    # H200 reads 33 KiB an SM in its latency. An SM of sm_80 has one program with three, one of sm_89 with two.
    num_buffers = 3 if arch == 80 else 2
    return Tiles(NARROW_LANES, 32, 4, 2 * num_buffers + 1, 2 if arch == 90 else 1)


def chunk_of(lanes: int) -> int:
    """Tokens of a chunk."""
    return NARROW_CHUNK if lanes == NARROW_LANES else WIDE_CHUNK


class MlaSchedule(AttentionSchedule):
    """A step's, for all layers of one shape, in memory that stays where it is. `update` makes it another step's.

    As kernels.attention.paged has it: groups of heads stand for its KV heads. One program computes decodes and prompts
    alike, so a query's result has the same bits in any batch and however its row is cut: batch_invariant, in any case.
    """

    def __init__(
        self,
        shape: LatentShape,
        *,
        max_num_seqs: int,
        max_context_len: int,
        cache_dtype: torch.dtype,
        device: torch.device | str,
        queries_per_tile: int = 1,
        chunk: int | None = None,
        num_programs: int | None = None,
        workspace_bytes: int = WORKSPACE_BYTES,
    ) -> None:
        """queries_per_tile: of a row, that read its entries together where there are lanes for them: 1 and as many as a
        step verifies drafts. chunk: tokens of a partition, a multiple of 128; None: as the lanes need it.

        Raises ValueError for sizes that the kernel doesn't know.
        """
        shape.check_for_gpus()
        tiles = mla_tiles(shape, cache_dtype, tile_arch(device), queries_per_tile=queries_per_tile)
        super().__init__(
            head_groups(shape, tiles.lanes),
            max_num_seqs=max_num_seqs,
            max_context_len=max_context_len,
            cache_dtype=cache_dtype,
            device=device,
            tiles=tiles,
            chunk=chunk or chunk_of(tiles.lanes),
            num_programs=num_programs,
            workspace_bytes=workspace_bytes,
        )
        self.shape = shape
        # Of each program, for chunks that it folds itself: the sums so far, and a chunk's.
        self.own_values = torch.empty(
            self.num_programs, 2, tiles.lanes, shape.latent_size, dtype=torch.float32, device=device
        )
