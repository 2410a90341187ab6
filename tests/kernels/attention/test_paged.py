import copy
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from kernels.attention.paged import AttentionPlanner, reference, torch_cpu
from kernels.attention.paged import native as native_module
from kernels.attention.plan import StepRows
from kernels.backend import Backend
from kernels.kv_cache.layout import HeadShape, KVScales
from kernels.kv_cache.write import RopeCacheWrite
from tests.support.kernels.kernel_paths import KINDS, NATIVE_KINDS, path_of

BLOCK_SIZE = 8
# Numbers of a head: a step of AMX tiles, and two vectors of 16.
HEADS = HeadShape(num_heads=6, num_kv_heads=2, head_size=32)


class Case:
    """Rows of (queries, context) over a cache whose blocks lie in random order and hold garbage beyond the contexts."""

    def __init__(
        self,
        *rows: tuple[int, int],
        dtype: torch.dtype = torch.float32,
        window: int = 0,
        attention_chunk: int = 0,
        block_size: int = BLOCK_SIZE,
        soft_cap: float = 0.0,
        has_sinks: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        lens = [context for _, context in rows]
        num_blocks = [-(-length // block_size) for length in lens]
        ids = np.random.default_rng(0).permutation(np.arange(1, sum(num_blocks) + 1))
        self.tables = np.zeros((len(rows), max(num_blocks)), dtype=np.int32)
        for row, count in enumerate(num_blocks):
            self.tables[row, :count], ids = ids[:count], ids[count:]
        self.starts = np.cumsum([0, *(queries for queries, _ in rows)]).astype(np.int32)
        self.lens = np.array(lens, dtype=np.int32)
        shape = (sum(num_blocks) + 1, block_size, 2, HEADS.num_kv_heads, HEADS.head_size)
        self.cache = torch.randn(shape, generator=generator).to(dtype)
        self.q = torch.randn(int(self.starts[-1]), HEADS.num_heads, HEADS.head_size, generator=generator)
        self.window, self.attention_chunk, self.soft_cap = window, attention_chunk, soft_cap
        self.sinks = torch.linspace(-2, 6, HEADS.num_heads) if has_sinks else None

    def in_blocks_of(self, block_size: int) -> "Case":
        """The same contexts, each block cut into several."""
        case, parts = copy.copy(self), self.cache.shape[1] // block_size
        case.cache = self.cache.unflatten(1, (parts, block_size)).flatten(0, 1)
        tables = self.tables[:, :, None] * parts + np.arange(parts)
        case.tables = tables.reshape(len(self.tables), -1).astype(np.int32)
        return case

    def run(self, kind: str = "torch", threads: int | None = None, kv_scales: KVScales | None = None) -> torch.Tensor:
        """threads: of C++ kernels; None: as many as PyTorch's. kv_scales: of an e4m3 cache."""
        path = path_of(kind, self.cache.dtype)
        cache = self.cache if kind == "torch" else in_native_layout(self.cache, kind)
        if path.native is not None:
            # A backend has set them to PyTorch's before.
            path.native.set_threads(threads or torch.get_num_threads())
        step = StepRows(
            query_starts=self.starts,
            context_lens=self.lens,
            block_tables=self.tables,
            block_size=cache.shape[1],
            cache_dtype=cache.dtype,
        )
        plan = AttentionPlanner(path, HEADS, self.window, self.attention_chunk).plan(step)
        with torch.inference_mode():
            attend = partial(
                plan.attend, self.q, cache, 0.25, kv_scales=kv_scales, soft_cap=self.soft_cap, sinks_H=self.sinks
            )
            first = attend()
            # A plan serves every layer: what one layer leaves in its buffers must not affect the next.
            second = attend()
        assert torch.equal(first, second)
        return second

    def expected(self) -> torch.Tensor:
        return reference.paged_attention(
            self.q,
            self.cache,
            query_starts=self.starts,
            context_lens=self.lens,
            block_tables=self.tables,
            scale=0.25,
            window=self.window,
            attention_chunk=self.attention_chunk,
            soft_cap=self.soft_cap,
            sinks=self.sinks,
        )


def in_native_layout(cache: torch.Tensor, kind: str) -> torch.Tensor:
    """The same keys and values in the layout of the C++ kernels, written by their own cache-write kernel."""
    heads, slots = HEADS, torch.arange(cache.shape[0] * cache.shape[1])
    write = RopeCacheWrite(
        path_of(kind, cache.dtype),
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_size=heads.head_size,
    )
    kv = cache.flatten(0, 1).flatten(1).float()
    q = torch.zeros(len(slots), heads.num_heads * heads.head_size)
    no_turn = torch.ones(len(slots), 1, heads.head_size // 2, dtype=torch.complex64)
    written = torch.empty_like(cache)
    write(torch.cat((q, kv), dim=1), no_turn, written, slots)
    return written


def _tolerance(backend: Backend, dtype: torch.dtype) -> float:
    """The reference uses the same rounded cache, so only float32 arithmetic differs; some paths also round queries and
    weights to bf16, by 2^-9 each."""
    rounds = backend.native is not None and backend.native.path.rounds_queries and dtype is torch.bfloat16
    return 2e-2 if rounds else 1e-5


CASES = {
    "one decode": [(1, 19)],
    "first token": [(1, 1)],
    "decodes of all lengths": [(1, length) for length in (1, 7, 8, 9, 33, 64, 100)],
    "whole prompt": [(21, 21)],
    "chunk after a prefix": [(9, 40)],
    "decodes, a chunk, a decode, a prompt": [(1, 12), (5, 30), (1, 50), (17, 17)],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 5, 16, 1000])
@pytest.mark.parametrize("rows", CASES.values(), ids=CASES)
def test_agrees_with_float64(rows: list[tuple[int, int]], window: int, dtype: torch.dtype, kind: str) -> None:
    case, tolerance = Case(*rows, dtype=dtype, window=window, block_size=16), _tolerance(path_of(kind, dtype), dtype)
    torch.testing.assert_close(case.run(kind).double(), case.expected(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", NATIVE_KINDS)
@pytest.mark.parametrize("block_size", [8, 16, 32, 256])
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("rows", [*CASES.values(), [(1, 1100), (3, 700)]], ids=[*CASES, "several segments"])
def test_an_e4m3_cache_gives_the_bits_of_its_numbers_in_bfloat16(
    rows: list[tuple[int, int]], window: int, block_size: int, kind: str
) -> None:
    case = Case(*rows, dtype=torch.float8_e4m3fn, window=window, block_size=block_size)
    widened = copy.copy(case)
    widened.cache = case.cache.to(torch.bfloat16)
    assert torch.equal(case.run(kind), widened.run(kind))


@pytest.mark.parametrize("kind", NATIVE_KINDS)
@pytest.mark.parametrize(("soft_cap", "has_sinks"), [(0.0, False), (4.0, True)])
def test_an_e4m3_cache_is_read_with_its_scales(soft_cap: float, has_sinks: bool, kind: str) -> None:
    case = Case((1, 70), (5, 21), (1, 1100), dtype=torch.float8_e4m3fn, soft_cap=soft_cap, has_sinks=has_sinks)
    scaled = copy.copy(case)
    scaled.cache = case.cache.float() * torch.tensor([0.25, 3.0]).view(2, 1, 1)
    got = case.run(kind, kv_scales=KVScales(torch.tensor([0.25]), torch.tensor([3.0])))
    tolerance = _tolerance(path_of(kind, torch.bfloat16), torch.bfloat16)
    torch.testing.assert_close(got.double(), scaled.expected(), rtol=tolerance, atol=3 * tolerance)


# Scores of these cases are about 1, and a few 4: both caps change them.
SCORES = [(0.0, True), (1.5, False), (4.0, True)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize(("soft_cap", "has_sinks"), SCORES)
def test_soft_caps_and_sinks_agree_with_float64(
    soft_cap: float, has_sinks: bool, window: int, dtype: torch.dtype, kind: str
) -> None:
    """In decodes and prompts, within a segment and over several."""
    rows = ((1, 12), (5, 30), (1, 1), (1, 1100), (7, 1030), (17, 17))
    case = Case(*rows, dtype=dtype, window=window, block_size=16, soft_cap=soft_cap, has_sinks=has_sinks)
    tolerance = _tolerance(path_of(kind, dtype), dtype)
    torch.testing.assert_close(case.run(kind).double(), case.expected(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_weights_are_as_exact_as_large_ones(dtype: torch.dtype, kind: str) -> None:
    """Two tokens a row; the one with less weight has the value 1. Weights are powers of 2."""
    exponents = torch.arange(1, 81) / 8
    case = Case(*[(1, 2)] * len(exponents), dtype=dtype)
    kv = case.cache[torch.from_numpy(case.tables[:, 0])]
    kv[:, :2] = 0.0
    kv[:, 0, 0, :, 0] = 1.0
    kv[:, 1, 1] = 1.0
    case.cache[torch.from_numpy(case.tables[:, 0])] = kv
    case.q = torch.zeros_like(case.q)
    case.q[:, :, 0] = exponents[:, None] * math.log(2) / 0.25
    expected = (1 / (1 + 2**exponents))[:, None, None].expand(case.q.shape)
    tolerance = min(_tolerance(path_of(kind, dtype), dtype), 6e-3)
    torch.testing.assert_close(case.run(kind).view(case.q.shape), expected, rtol=tolerance, atol=0.0)


@pytest.mark.parametrize("kind", NATIVE_KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "heads", [(4, 4, 8), (7, 1, 16), (32, 1, 8), (8, 2, 40), (10, 2, 128), (6, 2, 80), (4, 2, 96), (9, 3, 64)]
)
def test_any_number_of_heads_on_a_kv_head(
    heads: tuple[int, int, int], dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles hold at most 6 heads and vectors 8 or 16 numbers: some shapes fill none, others overflow them."""
    shape = HeadShape(num_heads=heads[0], num_kv_heads=heads[1], head_size=heads[2])
    monkeypatch.setitem(globals(), "HEADS", shape)
    tolerance = _tolerance(path_of(kind, dtype), dtype)
    case = Case((1, 12), (9, 71), (1, 130), dtype=dtype, block_size=16)
    torch.testing.assert_close(case.run(kind).double(), case.expected(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", NATIVE_KINDS)
@pytest.mark.parametrize("window", [0, 70, 700])
def test_contexts_longer_than_a_segment(window: int, kind: str) -> None:
    """A decode's segments are computed separately and combined; a prompt's are computed one after the other."""
    case = Case((1, 1100), (1, 512), (7, 1030), (1, 513), window=window, block_size=16)
    torch.testing.assert_close(case.run(kind).double(), case.expected(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("attention_chunk", [1, 7, 16, 520, 2000])
def test_a_query_sees_its_own_chunk_alone(attention_chunk: int, window: int, kind: str) -> None:
    """Decodes at a chunk's first and last position, prompts that cross chunk boundaries, and chunks that do not fill
    whole blocks, tiles or segments."""
    rows = ((1, 15), (1, 14), (1, 17), (17, 30), (1, 1100), (40, 1070), (30, 30))
    case = Case(*rows, window=window, attention_chunk=attention_chunk, block_size=16)
    torch.testing.assert_close(case.run(kind).double(), case.expected(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", NATIVE_KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_block_size_changes_no_bit(dtype: torch.dtype, kind: str) -> None:
    """Blocks of 8 are too small for vectors of 16."""
    case = Case((1, 12), (9, 71), (1, 630), dtype=dtype, block_size=32)
    whole = case.run(kind)
    assert torch.equal(case.in_blocks_of(16).run(kind), whole)
    assert torch.equal(case.in_blocks_of(8).run(kind), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_machines_whose_paths_round_alike_agree_to_the_bit(dtype: torch.dtype) -> None:
    """Vectors of 8 and of 16 numbers add in the same order."""
    paths = [kind for kind in NATIVE_KINDS if _tolerance(path_of(kind, dtype), dtype) < 1e-2]
    for soft_cap, has_sinks in ((0.0, False), (2.0, True)):
        case = Case((1, 12), (9, 71), (1, 630), dtype=dtype, block_size=16, soft_cap=soft_cap, has_sinks=has_sinks)
        results = [case.run(kind) for kind in paths]
        assert len(results) > 1
        assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", NATIVE_KINDS)
def test_what_lies_beyond_a_context_does_not_matter(kind: str, dtype: torch.dtype) -> None:
    """Blocks come from earlier requests: the tokens beyond a context may hold anything, and 0 times infinity is NaN."""
    case = Case((1, 19), (3, 41), dtype=dtype, block_size=16)
    clean = case.run(kind)
    for row, length in enumerate(case.lens):
        case.cache[case.tables[row, (length - 1) // 16], (length - 1) % 16 + 1 :] = torch.inf
    assert torch.equal(case.run(kind), clean)


# Tokens of rows with drafts, whose segments are computed apart; they lie in two segments, or in one.
DRAFTED = [(509, 513), (510, 518), (540, 543), (783, 800)]


@pytest.mark.parametrize("kind", NATIVE_KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 37}, {"window": 600}, {"attention_chunk": 300}, {"window": 37, "soft_cap": 2.0, "has_sinks": True}],
)
def test_a_query_has_the_same_bits_in_every_step(
    options: dict[str, Any], dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone or in a batch, as a decode or in a chunk of any length, with any tile height and number of threads."""
    length = 800
    make = partial(Case, dtype=dtype, block_size=16, **options)
    case = make((length, length), (1, 30))
    whole = case.run(kind)[:length]
    monkeypatch.setattr(native_module, "ROWS_PER_TILE", 7)
    assert torch.equal(case.run(kind, threads=1)[:length], whole)
    monkeypatch.undo()
    for first, last in ((0, 1), (62, 65), (511, 512), (512, 513), (500, 640), (799, 800), (3, 800), *DRAFTED):
        chunk = make((last - first, last), (1, 30))
        chunk.cache, chunk.tables, chunk.q = case.cache, case.tables, case.q[first:last]
        chunk.starts = np.array([0, last - first], dtype=np.int32)
        chunk.lens = np.array([last], dtype=np.int32)
        assert torch.equal(chunk.run(kind), whole[first:last]), (first, last)


# For each row the queries, the context, and the first blocks of 16 positions that it has of an earlier row.
SHARING = {
    "a prefix": [(1, 1100, 0, 0), (1, 1041, 0, 64), (1, 1300, 0, 64), (1, 1025, 0, 64)],
    "contexts that end with a segment": [(1, 512, 0, 0), (1, 512, 0, 32), (1, 513, 0, 32), (1, 1024, 0, 32)],
    "prefixes of prefixes": [
        *[(1, 1700, 0, 0), (1, 600, 0, 33), (1, 1600, 0, 96), (1, 700, 0, 0), (1, 40, 0, 2), (1, 1100, 3, 40)],
        *[(1, 1600, 0, 64), (1, 1600, 6, 96)],
    ],
    "drafts and chunks": [
        *[(1, 1100, 0, 0), (4, 1100, 0, 64), (3, 514, 0, 32), (3, 513, 0, 32), (60, 1100, 0, 64), (1, 1100, 0, 64)],
        *[(30, 1090, 0, 64), (8, 1200, 0, 64), (8, 1200, 0, 64)],
    ],
    "drafts in long contexts": [(8, 2200, 0, 0), (8, 2190, 0, 128)],
    "more rows than a tile": [(1, 600, 0, 0), *[(1, 520 + row, 0, 32) for row in range(18)]],
}


@pytest.mark.parametrize("kind", NATIVE_KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"window": 600}, {"soft_cap": 2.0, "has_sinks": True}])
@pytest.mark.parametrize("rows", SHARING.values(), ids=SHARING)
def test_rows_that_share_blocks_have_the_bits_that_they_have_alone(
    rows: list[tuple[int, int, int, int]], options: dict[str, Any], dtype: torch.dtype, kind: str
) -> None:
    case = Case(*[row[:2] for row in rows], dtype=dtype, block_size=16, **options)
    for row, (_, _, earlier, num_blocks) in enumerate(rows):
        case.tables[row, :num_blocks] = case.tables[earlier, :num_blocks]
    together = case.run(kind)
    # For so many threads, each query would be an item, and there is no room for so many.
    assert torch.equal(case.run(kind, threads=64), together)
    for row in range(len(rows)):
        first, end = case.starts[row : row + 2]
        alone = copy.copy(case)
        alone.starts, alone.lens = np.array([0, end - first], np.int32), case.lens[row : row + 1]
        alone.tables, alone.q = case.tables[row : row + 1], case.q[first:end]
        assert torch.equal(alone.run(kind), together[first:end]), row


@pytest.mark.parametrize(("window", "attention_chunk"), [(0, 0), (13, 0), (0, 21)])
def test_prompts_longer_than_a_tile(monkeypatch: pytest.MonkeyPatch, window: int, attention_chunk: int) -> None:
    """Each tile's mask is a view of one vector; a tile boundary in the wrong place shows here."""
    monkeypatch.setattr(torch_cpu, "QUERIES_PER_TILE", 16)
    case = Case((50, 50), (41, 77), (1, 20), window=window, attention_chunk=attention_chunk)
    torch.testing.assert_close(case.run().double(), case.expected(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_split_into_groups_of_similar_length(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Groups are not in batch order; outputs must return to their tokens."""
    monkeypatch.setattr(torch_cpu, "PADDED_TOKENS_PER_GROUP", 8)
    monkeypatch.setattr(torch_cpu, "CONVERTED_TOKENS_PER_GROUP", 64)
    case = Case((1, 5), (1, 90), (6, 6), (1, 33), (1, 88), (1, 4), (1, 35), dtype=dtype)
    torch.testing.assert_close(case.run().double(), case.expected(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_decode_row_does_not_depend_on_the_batch(kind: str) -> None:
    """Bit for bit: recomputation and preemption move a row to other batches, and greedy output must not change."""
    together = Case((1, 40), (1, 9), (1, 64))
    alone = Case((1, 40))
    alone.cache, alone.tables, alone.q = together.cache, together.tables[:1], together.q[:1]
    assert torch.equal(together.run(kind)[:1], alone.run(kind))


def test_bfloat16_queries_give_bfloat16() -> None:
    """The path of a CPU with bf16 instructions. Its products are bf16, with errors of 2^-7 for values of about 1."""
    case = Case((1, 40), (12, 30), dtype=torch.bfloat16)
    case.q = case.q.bfloat16()
    out = case.run()
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out.double(), case.expected(), rtol=2e-2, atol=2e-2)
