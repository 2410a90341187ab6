"""Tile sizes of paged attention, by architecture and by what a token takes.

None of these is measured yet; each says what it was reasoned from.
"""

from dataclasses import dataclass

import torch

from kernels.paged_attention.heads import HeadShape

# Tokens of a partition of v2. Its sums are reduced in order, wherever they are computed, so that where a context is
# split changes no bit; and a program that reads only one has 8 tiles to fill its pipeline with. A partition's sums take
# under 1% of the bytes of its keys and values then.
CHUNK = 512
# Shared memory that one block of threads may have, and all blocks of an SM, of which each takes 1 KiB more.
_SHARED_PER_BLOCK = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10}
_SHARED_PER_SM = {80: 164 << 10, 89: 100 << 10, 90: 228 << 10}
# Keys and values that a program of a decode loads at once, at most. Three times that in flight, twice on an SM, is more
# than an H200 reads in its latency (4.3 TB/s and 1 us: 33 KiB an SM); and an Ada has a fifth of the bandwidth.
_TILE_BYTES = {80: 32 << 10, 89: 16 << 10, 90: 32 << 10}
_MAX_BUFFERS = 3
# Lanes of a tile in decodes: the least a tensor core takes.
_MIN_LANES = 16
# Lanes under batch_invariant, for decodes and prefills alike: they share one program, since the order of a tensor
# core's sums is another for other shapes. 64 is the least of wgmma; before it, more would not fit into registers.
_INVARIANT_LANES = {80: 32, 89: 32, 90: 64}
_WGMMA_LANES = 64
MAX_GROUP = 128


@dataclass(frozen=True, slots=True)
class Tiles:
    # Lanes are pairs of a query and a query head of one KV head: lane = query * group + head.
    lanes: int
    # Tokens of keys and values that are loaded at once.
    tokens: int
    num_warps: int
    # Of Triton. Looking up blocks takes as many stages as the loads that wait for it: n buffers of keys and values are
    # 2n + 1 stages, or 2n - 1 with wgmma, whose operands stay where they are until it ends (as Triton 3.9 compiles it).
    num_stages: int
    # How many programs an SM holds at once, and so how many are started where programs take work after work.
    programs_per_sm: int

    def queries(self, group: int) -> int:
        return self.lanes // group


def padded(head_size: int) -> int:
    """Tiles have powers of two; what is beyond the head size is masked."""
    return 1 << (head_size - 1).bit_length()


def decode_tiles(heads: HeadShape, cache_dtype: torch.dtype, arch: int, *, batch_invariant: bool) -> Tiles:
    """For few queries and long contexts, where memory decides: two programs an SM if they fit, so that one loads while
    the other reduces, with as many tiles in flight as there is room for."""
    head_size = padded(heads.head_size)
    lanes = max(_INVARIANT_LANES[arch] if batch_invariant else _MIN_LANES, _power_of_two(heads.group_size))
    token_bytes = 2 * head_size * cache_dtype.itemsize
    # More than 64 tokens of 64 lanes, or 32 of 256 numbers, don't fit into the registers of one and two warp groups.
    most = 128 if lanes < _WGMMA_LANES else 64 if head_size <= 128 else 32
    if arch < 89 and cache_dtype.itemsize == 1:
        # Converting e4m3 by bits takes registers.
        most = min(most, 64 if lanes < _WGMMA_LANES else 32)
    tokens = next((n for n in (128, 64) if n <= most and n * token_bytes <= _TILE_BYTES[arch]), 32)
    # Before wgmma operands are in registers, too.
    room_of_4_warps = 64 * 128 if arch == 90 else 16 * 128 * cache_dtype.itemsize
    num_warps = 8 if lanes > _MIN_LANES and lanes * head_size > room_of_4_warps else 4
    # Queries, weights, and what goes between warps; an e4m3 tile is multiplied as a copy of 16 bits.
    others = lanes * (head_size + tokens) * 2 + (4 << 10)
    if cache_dtype.itemsize == 1 and lanes >= _WGMMA_LANES:
        others += 2 * token_bytes * tokens
    for programs in (2, 1):
        room = min(_SHARED_PER_BLOCK[arch], _SHARED_PER_SM[arch] // programs - (1 << 10)) - others
        buffers = min(_MAX_BUFFERS, room // (tokens * token_bytes))
        if buffers >= 2:
            break
    return Tiles(lanes, tokens, num_warps, _stages(buffers, lanes, arch), programs)


def prefill_tiles(heads: HeadShape, cache_dtype: torch.dtype, arch: int, *, has_chunks: bool) -> Tiles:
    """For many queries, where tensor cores decide: 128 lanes on two warp groups of Hopper, and 128 tokens a tile, which
    halve what is rescaled, where registers hold the scores of as many. has_chunks: queries see none but their own chunk
    of positions, whose edge takes registers, too (255 and up to 56 bytes of stack with twice as many tokens)."""
    head_size = padded(heads.head_size)
    if arch == 90:
        # Masks of padded head sizes, and copies of e4m3, take registers, too.
        roomy = head_size == heads.head_size and cache_dtype.itemsize == 2 and not has_chunks
        lanes, tokens = 128, 32 if head_size > 128 else 128 if roomy else 64
    else:
        lanes = 128 if head_size <= 128 else 64
        narrow = head_size > 64 and (arch == 89 or has_chunks)
        tokens = 32 if narrow or head_size > 128 or cache_dtype.itemsize == 1 else 64
    lanes = max(lanes, _power_of_two(heads.group_size))
    room = _SHARED_PER_BLOCK[arch] - lanes * head_size * 2 - (4 << 10)
    buffers = 2 if room >= 2 * 2 * tokens * head_size * cache_dtype.itemsize else 1
    return Tiles(lanes, tokens, 8, _stages(buffers, lanes, arch), 1)


def _stages(buffers: int, lanes: int, arch: int) -> int:
    return 2 * max(buffers, 1) + (-1 if arch == 90 and lanes >= _WGMMA_LANES else 1)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
