"""Tile sizes of attention, and the schedule, made on the GPU, that assigns a step's work to programs.

Rows of few queries (decodes) go to programs that loop over pieces of work: the whole context of a row (v1), or one
chunk of it, whose sums are reduced afterwards (v2). Rows of many queries go to programs for prefills. The host never
reads the schedule and grids depend on shapes alone, so a captured graph stays valid for any rows.

Each comment gives the reasoning behind a tile size; what an H200 showed is in docs/gpu.md.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton.language as tl

from kernels.kv_cache.layout import HeadShape
from kernels.triton_common.device import arch_of
from kernels.triton_common.integers import cdiv, next_power_of_2
from kernels.triton_common.jit import jit
from kernels.triton_common.numbers import PairForm

# Tokens of a chunk of v2. Chunks are reduced in order, whichever program computed them, so splitting a context changes
# no bit. At 512, a program that reads a single chunk has 8 tiles to fill its pipeline with, and a chunk's sums take
# under 1% of the bytes of its keys and values.
CHUNK = 512
# Shared memory, in bytes, that one thread block may use, and that all blocks of an SM may use together; each block
# takes 1 KiB on top of its own.
_SHARED_PER_BLOCK = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
_SHARED_PER_SM = {80: 164 << 10, 89: 100 << 10, 90: 228 << 10, 100: 228 << 10}
# The most bytes of keys and values that a decode program loads at once. Three such tiles in flight, in each of two
# programs per SM, are more than an H200 reads within its latency (4.3 TB/s and 1 us: 33 KiB an SM); an Ada has a fifth
# of the bandwidth.
_TILE_BYTES = {80: 32 << 10, 89: 16 << 10, 90: 32 << 10, 100: 32 << 10}
_MAX_BUFFERS = 3
# Lanes of a decode tile: the fewest that a tensor core takes.
_MIN_LANES = 16
# Lanes under batch_invariant. Decodes and prefills share one program then, since a tensor core adds in another order
# for another shape. 64 is the fewest that wgmma takes; without wgmma, more than 32 would not fit into registers.
_INVARIANT_LANES = {80: 32, 89: 32, 90: 64, 100: 32}
_WGMMA_LANES = 64
# The most lanes that drafts ask for; without wgmma, more would not fit into registers.
_MOST_DRAFT_LANES = {80: 32, 89: 32, 90: 64, 100: 32}
MAX_GROUP = 128


@dataclass(frozen=True, slots=True)
class Tiles:
    # Lanes are pairs of a query and a query head of one KV head: lane = query * group + head.
    lanes: int
    # Tokens of keys and values that are loaded at once.
    tokens: int
    num_warps: int
    # Triton's num_stages. Looking up blocks takes as many stages as the loads that wait for it: n buffers of keys and
    # values are 2n + 1 stages, or 2n - 1 with wgmma, whose operands stay in place until it ends (in Triton 3.9).
    num_stages: int
    # Programs that an SM holds at once; so many per SM are started where programs loop over work.
    programs_per_sm: int

    def queries(self, group: int) -> int:
        return self.lanes // group


def padded(head_size: int) -> int:
    """The head size of tiles, a power of two; lanes beyond the real head size are masked."""
    return 1 << (head_size - 1).bit_length()


def decode_tiles(
    heads: HeadShape,
    cache_dtype: torch.dtype,
    arch: int,
    *,
    batch_invariant: bool,
    most_queries: int = 1,
    pairs: bool = True,
) -> Tiles:
    """Tiles for few queries and long contexts, where memory is the limit: two programs per SM if they fit, so that one
    loads while the other reduces, with as many tiles in flight as fit. most_queries: of a row that decodes, with its
    drafts; as far as they fit, one tile has them all, so that their keys and values are read once."""
    head_size = padded(heads.head_size)
    with_drafts = min(next_power_of_2(heads.group_size * most_queries), _MOST_DRAFT_LANES[arch])
    lanes = max(
        _INVARIANT_LANES[arch] if batch_invariant else _MIN_LANES, next_power_of_2(heads.group_size), with_drafts
    )
    token_bytes = 2 * head_size * cache_dtype.itemsize
    is_e4m3 = cache_dtype.itemsize == 1
    # One and two warp groups have no registers for more than 64 tokens with 64 lanes, or 32 tokens of 256 numbers, or
    # 32 tokens of pairs, which become twice as many numbers of 16 bits.
    most = 128 if lanes < _WGMMA_LANES else 64 if head_size <= 128 and not is_e4m3 else 32
    if is_e4m3 and (arch < 89 or not pairs):
        # Converting e4m3 bit by bit takes registers. Number by number, 64 tokens, two buffers and two programs an SM
        # were the fastest of 12 tiles on an H200 (0.308 ms at 64 x 4,096; the others 0.313 to 0.477). Pairs have what
        # bfloat16 has there at 0.88 to 1.02 of a copy's bandwidth: 32 KiB a tile. 128 tokens take 6.2 instructions a
        # token and warp, 64 take 8.3 (compiled by Triton 3.6; not timed).
        most = min(most, 64 if lanes < _WGMMA_LANES else 32)
    if arch == 100 and lanes > _MIN_LANES:
        # 64 tokens spill 8 to 64 B with 32 and 64 lanes (Triton 3.9).
        most = 32
    tokens = next((n for n in (128, 64) if n <= most and n * token_bytes <= _TILE_BYTES[arch]), 32)
    # Without wgmma, operands are in registers, too.
    room_of_4_warps = 64 * 128 if arch == 90 else 16 * 128 * cache_dtype.itemsize
    num_warps = 8 if lanes > _MIN_LANES and lanes * head_size > room_of_4_warps else 4
    # Queries, weights, and exchange between warps; an e4m3 tile is multiplied as a 16-bit copy.
    others = lanes * (head_size + tokens) * 2 + (4 << 10)
    if is_e4m3 and lanes >= _WGMMA_LANES:
        others += 2 * token_bytes * tokens
    # Two warp groups that hold 64 lanes of 256 numbers use all registers of an SM.
    programs, buffers = 1, 1
    for programs in (1,) if num_warps == 8 and lanes >= _WGMMA_LANES else (2, 1):
        room = min(_SHARED_PER_BLOCK[arch], _SHARED_PER_SM[arch] // programs - (1 << 10)) - others
        buffers = min(2 if is_e4m3 and not pairs else _MAX_BUFFERS, room // (tokens * token_bytes))
        if buffers >= 2:
            break
    return Tiles(lanes, tokens, num_warps, _stages(buffers, lanes, arch), programs)


def prefill_tiles(heads: HeadShape, cache_dtype: torch.dtype, arch: int, *, has_chunks: bool) -> Tiles:
    """Tiles for many queries, where tensor cores are the limit: 128 lanes on two warp groups of Hopper, and, where
    registers hold their scores, 128 tokens a tile, which halves the rescaling. has_chunks: queries see only their own
    chunk of positions; its edge takes registers, too (255 and up to 56 bytes of stack with twice as many tokens)."""
    head_size = padded(heads.head_size)
    if arch == 90:
        # Masks for padded head sizes and copies of e4m3 take registers, too.
        roomy = head_size == heads.head_size and cache_dtype.itemsize == 2 and not has_chunks
        lanes, tokens = 128, 32 if head_size > 128 else 128 if roomy else 64
    else:
        lanes = 128 if head_size <= 128 else 64
        narrow = head_size > 64 and (arch == 89 or has_chunks)
        tokens = 32 if narrow or head_size > 128 or cache_dtype.itemsize == 1 else 64
    lanes = max(lanes, next_power_of_2(heads.group_size))
    room = _SHARED_PER_BLOCK[arch] - lanes * head_size * 2 - (4 << 10)
    buffers = 2 if room >= 2 * 2 * tokens * head_size * cache_dtype.itemsize else 1
    return Tiles(lanes, tokens, 8, _stages(buffers, lanes, arch), 1)


def _stages(buffers: int, lanes: int, arch: int) -> int:
    return 2 * max(buffers, 1) + (-1 if arch == 90 and lanes >= _WGMMA_LANES else 1)


# A context is read in one pass if its length is at most 1/4 of what an average program reads: then the last pass to end
# delays the step only a little.
_ONE_PASS_SHARE = 4
# Memory for the partial sums. Contexts whose sums don't fit are read in one pass.
WORKSPACE_BYTES = 256 << 20
# Lines of `AttentionSchedule.starts`: running totals, from 0 at the first row to the whole count after the last row.
# They count pieces of work per KV head; partial sums (one for each query and chunk); queries whose sums are reduced;
# tiles of prefills.
WORK, PARTIALS, REDUCED, PREFILL = (tl.constexpr(line) for line in range(4))
# Rows that the schedule's kernel processes at once.
_ROWS = 1024


class AttentionSchedule:
    """A step's schedule, for all layers of one head shape and window, updated in place: its memory never moves."""

    def __init__(
        self,
        heads: HeadShape,
        *,
        max_num_seqs: int,
        max_context_len: int,
        cache_dtype: torch.dtype,
        device: torch.device | str,
        window: int = 0,
        attention_chunk: int = 0,
        batch_invariant: bool = False,
        most_queries: int = 1,
        pairs: bool = True,
        tiles: Tiles | None = None,
        chunk: int = CHUNK,
        num_programs: int | None = None,
        workspace_bytes: int = WORKSPACE_BYTES,
    ) -> None:
        """window: tokens that a query sees, itself included; 0: all before it. attention_chunk: positions are cut into
        chunks of this size, and a query sees only its own chunk; 0: no chunks.

        batch_invariant: a query's result has the same bits however its row is cut into chunks of prefill and decodes;
        it never depends on other rows. most_queries: of a row that decodes, see decode_tiles. pairs: decodes
        read an e4m3 cache by pairs; False: number by number, as a benchmark compares them. tiles: the tiles of a kernel
        for another cache than keys and values (kernels.attention.latent), which computes all rows. chunk: tokens of a
        chunk of v2, a multiple of 128.
        num_programs: programs that read the contexts of decodes; None: as many as the GPU holds at once.

        Raises ValueError for head shapes and windows that the kernels don't know.
        """
        if heads.num_heads % heads.num_kv_heads or heads.group_size > MAX_GROUP:
            raise ValueError(
                f"{heads.num_heads} heads on {heads.num_kv_heads} KV heads: each KV head needs equally many heads, "
                f"{MAX_GROUP} at most"
            )
        if window < 0:
            raise ValueError(f"window {window}: it must be at least 0, which means none")
        if attention_chunk < 0:
            raise ValueError(f"attention_chunk {attention_chunk}: it must be at least 0, which means none")
        if chunk % 128 or chunk < 128:
            raise ValueError(f"chunk {chunk} is not a multiple of 128, the largest tile")
        self.heads, self.window, self.attention_chunk = heads, window, attention_chunk
        self.chunk, self.batch_invariant = chunk, batch_invariant
        arch = tile_arch(device)
        self.cache_dtype = cache_dtype
        # The form in which the kernel for decodes converts pairs of e4m3; None: the cache is read number by number.
        self.pairs: PairForm | None = pair_form(device) if pairs and cache_dtype.itemsize == 1 else None
        self.decode: Tiles = tiles or decode_tiles(
            heads, cache_dtype, arch, batch_invariant=batch_invariant, most_queries=most_queries, pairs=pairs
        )
        self.prefill: Tiles | None = None
        if not (batch_invariant or tiles):
            self.prefill = prefill_tiles(heads, cache_dtype, arch, has_chunks=attention_chunk > 0)
        self.num_programs = num_programs or _num_sms(device) * self.decode.programs_per_sm
        max_partials = max_num_seqs * most_queries * cdiv(max_context_len, chunk)
        partial_bytes = 4 * heads.num_heads * (heads.head_size + 2)
        self.num_partials = min(max_partials, workspace_bytes // partial_bytes)
        size = (self.num_partials, heads.num_heads)
        # int32 [4, max_num_seqs + 1].
        self.starts = torch.zeros(4, max_num_seqs + 1, dtype=torch.int32, device=device)
        # Running softmaxes per query, head and chunk: greatest score and sum of weights; sum of weighted values.
        self.partial_sums = torch.empty(*size, 2, dtype=torch.float32, device=device)
        self.partial_values = torch.empty(*size, heads.head_size, dtype=torch.float32, device=device)

    @property
    def queries_per_tile(self) -> int:
        """Rows of at most this many queries are decodes, unless all rows are treated alike."""
        return self.decode.queries(self.heads.group_size)

    def decodes_of(self, query_lens: np.ndarray, context_lens: np.ndarray) -> tuple[bool, bool]:
        """Returns whether a step with these rows has decodes, and whether a context of theirs may be cut into
        chunks."""
        contexts = context_lens
        if self.prefill is not None:
            contexts = contexts[query_lens <= self.queries_per_tile]
        return len(contexts) > 0, int(contexts.max(initial=0)) > self.chunk

    def update(self, query_starts: torch.Tensor, context_lens: torch.Tensor) -> None:
        """Makes this the schedule of another step. query_starts: int32 [S + 1], context_lens: int32 [S], on the GPU.

        Padding rows have no queries, or a context of 0 tokens. Raises ValueError for more rows than there is room for.
        """
        num_rows, max_rows = len(context_lens), self.starts.shape[1] - 1
        if num_rows > max_rows or len(query_starts) != num_rows + 1:
            raise ValueError(
                f"{num_rows} contexts and {len(query_starts)} query_starts: one start more than contexts is expected, "
                f"and at most max_num_seqs={max_rows} contexts"
            )
        schedule_kernel[(1,)](
            query_starts,
            context_lens,
            self.starts,
            self.starts.stride(0),
            num_rows,
            self.num_programs,
            self.num_partials,
            **schedule_constants(self.heads, self.window, self.attention_chunk, self.chunk, self.decode, self.prefill),
            num_warps=4,
        )


def check_table_rows(table_rows: torch.Tensor | None, context_lens: torch.Tensor) -> None:
    """Raises ValueError unless table_rows is None or has one int32 for each context."""
    if table_rows is not None and (table_rows.shape != context_lens.shape or table_rows.dtype is not torch.int32):
        raise ValueError(
            f"table_rows is {table_rows.dtype} {tuple(table_rows.shape)}: torch.int32 {tuple(context_lens.shape)}, one "
            "for each context, is expected"
        )


def schedule_constants(
    heads: HeadShape, window: int, attention_chunk: int, chunk: int, decode: Tiles, prefill: Tiles | None
) -> dict[str, int]:
    """The constants that `schedule_kernel` is compiled for."""
    return {
        "KV_HEADS": heads.num_kv_heads,
        "WINDOW": window,
        "ATTENTION_CHUNK": attention_chunk,
        "CHUNK": chunk,
        "QUERIES": decode.queries(heads.group_size),
        "PREFILL_QUERIES": 0 if prefill is None else prefill.queries(heads.group_size),
        "ONE_PASS_SHARE": _ONE_PASS_SHARE,
        "ROWS": _ROWS,
    }


@jit
def first_token(context, queries, WINDOW: tl.constexpr, ATTENTION_CHUNK: tl.constexpr):
    """The first token that a row's first query sees; the row's queries are the last tokens of its context."""
    result = context * 0
    if WINDOW > 0:
        result = tl.maximum(context - queries - (WINDOW - 1), 0)
    if ATTENTION_CHUNK > 0:
        result = tl.maximum(result, (context - queries) // ATTENTION_CHUNK * ATTENTION_CHUNK)
    return result


@jit
def _row_work(
    query_starts,
    context_lens,
    row,
    num_rows,
    WINDOW: tl.constexpr,
    ATTENTION_CHUNK: tl.constexpr,
    CHUNK: tl.constexpr,
    QUERIES: tl.constexpr,
    PREFILL_QUERIES: tl.constexpr,
):
    """Counts for each row: queries, tiles of decodes and of prefills, tokens that a tile reads, and their chunks."""
    exists = row < num_rows
    queries = tl.load(query_starts + row + 1, exists, 0) - tl.load(query_starts + row, exists, 0)
    context = tl.load(context_lens + row, exists, 0)
    first = first_token(context, queries, WINDOW, ATTENTION_CHUNK)
    chunks = tl.where(context > 0, (context - 1) // CHUNK - first // CHUNK + 1, 0)
    tiles = (queries + QUERIES - 1) // QUERIES
    prefill_tiles = tiles * 0
    if PREFILL_QUERIES > 0:
        prefill_tiles = tl.where(queries > QUERIES, (queries + PREFILL_QUERIES - 1) // PREFILL_QUERIES, 0)
        tiles = tl.where(queries > QUERIES, 0, tiles)
    return queries, tiles, prefill_tiles, context - first, chunks


@jit(do_not_specialize=["num_rows", "num_partials"])
def schedule_kernel(
    query_starts,
    context_lens,
    starts,
    line_stride,
    num_rows,
    num_programs,
    num_partials,
    KV_HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    ATTENTION_CHUNK: tl.constexpr,
    CHUNK: tl.constexpr,
    QUERIES: tl.constexpr,
    PREFILL_QUERIES: tl.constexpr,
    ONE_PASS_SHARE: tl.constexpr,
    ROWS: tl.constexpr,
):
    all_tokens = tl.zeros((), tl.int64)
    for first_row in range(0, num_rows, ROWS):
        row = first_row + tl.arange(0, ROWS)
        _, tiles, _, tokens, _ = _row_work(
            query_starts, context_lens, row, num_rows, WINDOW, ATTENTION_CHUNK, CHUNK, QUERIES, PREFILL_QUERIES
        )
        all_tokens += tl.sum(tiles.to(tl.int64) * tokens, axis=0)
    work, partials, reduced, prefill = 0, 0, 0, 0
    requested = tl.zeros((), tl.int64)
    for first_row in range(0, num_rows, ROWS):
        row = first_row + tl.arange(0, ROWS)
        queries, tiles, prefill_tiles, tokens, chunks = _row_work(
            query_starts, context_lens, row, num_rows, WINDOW, ATTENTION_CHUNK, CHUNK, QUERIES, PREFILL_QUERIES
        )
        too_long = tokens.to(tl.int64) * num_programs * ONE_PASS_SHARE > all_tokens * KV_HEADS
        wanted = tl.where(too_long & (chunks > 1) & (tiles > 0), queries * chunks, 0).to(tl.int64)
        wanted_to_here = requested + tl.cumsum(wanted, axis=0)
        requested += tl.sum(wanted, axis=0)
        split = (wanted > 0) & (wanted_to_here <= num_partials)
        row_partials = tl.where(split, wanted, 0).to(tl.int32)
        work = _store_starts(starts, row, num_rows, work, tiles * tl.where(split, chunks, 1))
        partials = _store_starts(starts + line_stride, row, num_rows, partials, row_partials)
        reduced = _store_starts(starts + 2 * line_stride, row, num_rows, reduced, tl.where(split, queries, 0))
        prefill = _store_starts(starts + 3 * line_stride, row, num_rows, prefill, prefill_tiles)


@jit
def _store_starts(line, row, num_rows, before, numbers):
    """Stores each row's running total as the next row's start (the first start is always 0); returns the new total."""
    tl.store(line + row + 1, before + tl.cumsum(numbers, axis=0), mask=row < num_rows)
    return before + tl.sum(numbers, axis=0)


def tile_arch(device: torch.device | str) -> int:
    """The newest architecture that has tile sizes and that the device supports; the interpreter counts as Hopper."""
    arch = arch_of(device) or 90
    if arch < 80:
        raise ValueError(
            f"{torch.cuda.get_device_name(device)} has compute capability {arch / 10:.1f}; it must be at least 8.0"
        )
    # 8.6 and 12.0 have as little shared memory as 8.9. 10.0 has as much as 9.0, but no wgmma, and these kernels don't
    # use what it has instead: with Hopper's tiles, scores and sums of 64 lanes spill (up to 1,080 B).
    return 80 if arch in (80, 87) else 89 if arch < 90 or arch >= 120 else 90 if arch < 100 else 100


def pair_form(device: torch.device | str) -> PairForm:
    """How kernels convert pairs of e4m3 on this device."""
    arch = arch_of(device)
    return "cvt" if arch is not None and arch >= 89 else "bits"


def _num_sms(device: torch.device | str) -> int:
    if torch.device(device).type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count
