"""What of a step goes to which program, decided on the GPU.

Rows of few queries, decodes that is, go to programs that take work after work, of one of two kinds: the whole context
of a row (v1), or one chunk of it, whose sums are reduced afterwards (v2). Rows of many queries go to programs for
prefills. Nothing of it is read by the host, and grids depend on nothing but shapes: a captured graph stays valid
whatever rows it is replayed with.
"""

import torch
import triton
import triton.language as tl

from kernels.paged_attention.gpu_tiles import CHUNK, MAX_GROUP, Tiles, decode_tiles, prefill_tiles
from kernels.paged_attention.heads import HeadShape
from kernels.tiles.jit import jit

# A context is read in one pass if it is at most this part of what a program has to read on average, for then the last
# pass to end makes nobody wait for long.
_ONE_PASS_SHARE = 4
# Of the partial sums. Contexts that don't fit any more are read in one pass.
WORKSPACE_BYTES = 256 << 20
# Lines of `AttentionSchedule.starts`: each row's first number of something, and behind the last row how many there are.
# Pieces of work per KV head; partial sums (one for each query and chunk); queries whose sums are reduced; tiles of
# prefills.
WORK, PARTIALS, REDUCED, PREFILL = (tl.constexpr(line) for line in range(4))
# Rows that the schedule's kernel looks at together.
_ROWS = 1024


class AttentionSchedule:
    """A step's, for all layers of one head shape and window, in memory that stays where it is."""

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
        tiles: Tiles | None = None,
        chunk: int = CHUNK,
        num_programs: int | None = None,
        workspace_bytes: int = WORKSPACE_BYTES,
    ) -> None:
        """window: tokens that a query sees, itself included; 0: all before it. attention_chunk: positions are cut into
        chunks of so many, and a query sees none but its own; 0: they are not.

        batch_invariant: a query's result has the same bits however its row is cut into chunks of prefill and decodes;
        that it doesn't depend on other rows is so in any case. tiles: of a kernel for another cache than that of keys
        and values (kernels.mla_attention), which computes all rows. chunk: tokens of a partition, a multiple of 128.
        num_programs: that read decodes' contexts; None: as many as the GPU holds at once.

        Raises ValueError for head shapes and windows that the kernels don't know.
        """
        if heads.num_heads % heads.num_kv_heads or heads.group_size > MAX_GROUP:
            raise ValueError(
                f"{heads.num_heads} heads on {heads.num_kv_heads} KV heads: there have to be equally many, {MAX_GROUP} "
                "at most, on each"
            )
        if window < 0:
            raise ValueError(f"window {window}: 0 is none, others are above it")
        if attention_chunk < 0:
            raise ValueError(f"attention_chunk {attention_chunk}: 0 is none, others are above it")
        if chunk % 128 or chunk < 128:
            raise ValueError(f"chunk {chunk} is no multiple of 128, the largest tile")
        self.heads, self.window, self.attention_chunk = heads, window, attention_chunk
        self.chunk, self.batch_invariant = chunk, batch_invariant
        arch = tile_arch(device)
        self.cache_dtype = cache_dtype
        self.decode: Tiles = tiles or decode_tiles(heads, cache_dtype, arch, batch_invariant=batch_invariant)
        self.prefill: Tiles | None = None
        if not (batch_invariant or tiles):
            self.prefill = prefill_tiles(heads, cache_dtype, arch, has_chunks=attention_chunk > 0)
        self.num_programs = num_programs or _num_sms(device) * self.decode.programs_per_sm
        max_partials = max_num_seqs * triton.cdiv(max_context_len, chunk)
        partial_bytes = 4 * heads.num_heads * (heads.head_size + 2)
        self.num_partials = min(max_partials, workspace_bytes // partial_bytes)
        size = (self.num_partials, heads.num_heads)
        # int32 [4, max_num_seqs + 1].
        self.starts = torch.zeros(4, max_num_seqs + 1, dtype=torch.int32, device=device)
        # Running softmaxes of a query, a head and a chunk: greatest score and sum of weights; sum of weighted values.
        self.partial_sums = torch.empty(*size, 2, dtype=torch.float32, device=device)
        self.partial_values = torch.empty(*size, heads.head_size, dtype=torch.float32, device=device)

    @property
    def queries_per_tile(self) -> int:
        """Rows of at most so many queries are decodes, unless all rows are treated alike."""
        return self.decode.queries(self.heads.group_size)

    def update(self, query_starts: torch.Tensor, context_lens: torch.Tensor) -> None:
        """From here on it is another step's. query_starts: int32 [S + 1], context_lens: int32 [S], on the GPU.

        Padding rows have no queries, or a context of 0 tokens. Raises ValueError for more rows than there is room for.
        """
        num_rows, max_rows = len(context_lens), self.starts.shape[1] - 1
        if num_rows > max_rows or len(query_starts) != num_rows + 1:
            raise ValueError(
                f"{num_rows} contexts and {len(query_starts)} starts of queries: one start more than contexts, and "
                f"max_num_seqs={max_rows} contexts at most"
            )
        schedule_kernel[(1,)](
            query_starts, context_lens, self.starts, self.starts.stride(0), num_rows, self.num_programs,
            self.num_partials,
            **schedule_constants(
                self.heads, self.window, self.attention_chunk, self.chunk, self.decode, self.prefill
            ),
            num_warps=4,
        )  # fmt: skip


def schedule_constants(
    heads: HeadShape, window: int, attention_chunk: int, chunk: int, decode: Tiles, prefill: Tiles | None
) -> dict[str, int]:
    """What `schedule_kernel` is compiled for."""
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
    """The first token that a row's first query sees, if its queries are the last of the context."""
    result = context * 0
    if WINDOW > 0:
        result = tl.maximum(context - queries - (WINDOW - 1), 0)
    if ATTENTION_CHUNK > 0:
        result = tl.maximum(result, (context - queries) // ATTENTION_CHUNK * ATTENTION_CHUNK)
    return result


@jit
def _row_work(
    query_starts, context_lens, row, num_rows,
    WINDOW: tl.constexpr, ATTENTION_CHUNK: tl.constexpr, CHUNK: tl.constexpr, QUERIES: tl.constexpr,
    PREFILL_QUERIES: tl.constexpr,
):  # fmt: skip
    """Of each row: queries, tiles of decodes and of prefills, tokens that a tile reads, and the chunks they lie in."""
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


@jit
def schedule_kernel(
    query_starts, context_lens, starts, line_stride, num_rows, num_programs, num_partials,
    KV_HEADS: tl.constexpr, WINDOW: tl.constexpr, ATTENTION_CHUNK: tl.constexpr, CHUNK: tl.constexpr,
    QUERIES: tl.constexpr, PREFILL_QUERIES: tl.constexpr, ONE_PASS_SHARE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
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
    """Where the next row begins; a row's start is stored by the row before it, and the first one's is always 0."""
    tl.store(line + row + 1, before + tl.cumsum(numbers, axis=0), mask=row < num_rows)
    return before + tl.sum(numbers, axis=0)


def tile_arch(device: torch.device | str) -> int:
    """The newest one that there are tile sizes for and the device can do; the interpreter stands for Hopper."""
    if torch.device(device).type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    arch = 10 * major + minor
    if arch < 80:
        raise ValueError(
            f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}; 8.0 is the least"
        )
    # 8.6 has as little shared memory as 8.9.
    return 80 if arch in (80, 87) else 89 if arch < 90 or arch >= 120 else 90


def _num_sms(device: torch.device | str) -> int:
    if torch.device(device).type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count
