"""Tile sizes and schedule of MLA, which computes all rows as decodes."""

import torch
import triton

from kernels.attention.triton_schedule import WORKSPACE_BYTES, AttentionSchedule, Tiles, tile_arch
from kernels.kv_cache.layout import HeadShape, LatentShape

# The fewest lanes that a tensor core takes, and that Hopper's wgmma takes. Nothing in between helps: without wgmma each
# warp holds all queries in registers, and 32 lanes of 576 numbers leave none.
NARROW_LANES, WIDE_LANES = 16, 64
# Triton 3.6 has no way to split the scores of wide tiles among two warp groups (latent/triton.py, `_attend`): both hold
# all of them, and the build spills 16 B even with 32 tokens, 300 B with e4m3. It takes narrow tiles alone.
WIDE_FITS = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)
# Tokens of a chunk. Its sums are 2 KiB a head: written once and read once, those of 16 heads add a ninth to the bytes
# of its entries. 64 heads are bound by tensor cores; the end of a chunk stores 128 KiB from registers while nothing is
# multiplied, about a fifth of the time of 1,024 tokens.
NARROW_CHUNK, WIDE_CHUNK = 512, 1024


def head_groups(shape: LatentShape, lanes: int) -> HeadShape:
    """Groups of heads for programs, at most `lanes` heads each. Every group reads the entries itself, all but the first
    from L2."""
    num_groups = next(
        n for n in range(1, shape.num_heads + 1) if n * lanes >= shape.num_heads and shape.num_heads % n == 0
    )
    return HeadShape(num_heads=shape.num_heads, num_kv_heads=num_groups, head_size=shape.latent_size)


def mla_tiles(shape: LatentShape, cache_dtype: torch.dtype, arch: int, *, queries_per_tile: int = 1) -> Tiles:
    """queries_per_tile: queries of a row that read its entries together, if there are enough lanes."""
    size = cache_dtype.itemsize
    if size == 4:
        # float32, for the models of tests: no tensor cores.
        return Tiles(NARROW_LANES, 32, 4, 1, 1)
    # Without wgmma, Triton would not prefetch e4m3, since the two products need it in different layouts.
    if arch == 90 and WIDE_FITS and (shape.num_heads * queries_per_tile > NARROW_LANES or size == 1):
        # Queries take 72 KiB of shared memory, two tiles of 64 tokens 144, weights 8: all there is. wgmma reads e4m3
        # from a 16-bit copy. Two warp groups hold the sums, half of the latent each, as in FlashMLA.
        return Tiles(WIDE_LANES, 64, 8, 3, 1)
    if size == 1:
        return Tiles(NARROW_LANES, 64, 8, 3, 1)
    # A tile has 36 KiB of entries. On Hopper, each of two programs per SM has two tiles in flight or being multiplied;
    # an H200 reads 33 KiB an SM within its latency. sm_80 runs one program per SM with three tiles, sm_89 one with two.
    num_buffers = 3 if arch == 80 else 2
    return Tiles(NARROW_LANES, 32, 4, 2 * num_buffers + 1, 2 if arch in (90, 100) else 1)


def chunk_of(lanes: int) -> int:
    """Tokens of a chunk."""
    return NARROW_CHUNK if lanes == NARROW_LANES else WIDE_CHUNK


class MlaSchedule(AttentionSchedule):
    """A step's schedule, for all layers of one shape, updated in place: its memory never moves.

    It is the schedule of kernels.attention.paged, with groups of heads for KV heads. One program computes decodes and
    prompts alike, so a query's result has the same bits in any batch, however its row is cut: always batch_invariant.
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
        pairs: bool = True,
        chunk: int | None = None,
        num_programs: int | None = None,
        workspace_bytes: int = WORKSPACE_BYTES,
    ) -> None:
        """queries_per_tile: queries of a row that read its entries together, if there are enough lanes: 1 + the drafts
        that a step verifies. pairs: as for AttentionSchedule. chunk:
        tokens of a chunk, a multiple of 128; None: chosen by the number of lanes.

        Raises ValueError for sizes that the kernel doesn't support.
        """
        shape.check_for_gpus()
        tiles = mla_tiles(shape, cache_dtype, tile_arch(device), queries_per_tile=queries_per_tile)
        super().__init__(
            head_groups(shape, tiles.lanes),
            max_num_seqs=max_num_seqs,
            max_context_len=max_context_len,
            cache_dtype=cache_dtype,
            device=device,
            pairs=pairs,
            tiles=tiles,
            chunk=chunk or chunk_of(tiles.lanes),
            num_programs=num_programs,
            workspace_bytes=workspace_bytes,
        )
        self.shape = shape
        # Each program's memory for chunks that it folds itself: the sums so far, and those of one chunk.
        self.own_values = torch.empty(
            self.num_programs, 2, tiles.lanes, shape.latent_size, dtype=torch.float32, device=device
        )
