"""Paged attention for GPUs: against float64, and variations that must not change a bit.

Every step's cache holds NaN outside of the contexts, block tables name no block there, and outputs start as NaN.
"""

import itertools

import pytest
import torch

from kernels.attention.paged.triton import AttentionSchedule, paged_attention
from kernels.attention.triton_schedule import PARTIALS, PREFILL, WORK
from kernels.kv_cache.layout import HeadShape
from tests.support.gpu.gpu import DEVICE
from tests.support.gpu.paged_attention_gpu import NO_BLOCK, SCALE, Options, Step

# Decodes up to and beyond tiles of 64 and chunks of 128, drafts, prompts, a chunk after a prefix.
MIXED = ((1, 1), (1, 129), (3, 66), (18, 70), (1, 260))
# float32 kernels add up a few hundred numbers of size 1, on a GPU one after the other; bf16 rounds weights and results
# by 2^-9 each, fp16 by 2^-12.
TOLERANCES = {torch.float32: 2e-6 if DEVICE == "cpu" else 1e-5, torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}


def heads(num_heads: int, num_kv_heads: int, head_size: int) -> HeadShape:
    return HeadShape(num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size)


def check(step: Step) -> None:
    tolerance = TOLERANCES[step.dtype]
    torch.testing.assert_close(step.run().cpu().double(), step.expected(), rtol=tolerance, atol=tolerance)


# Each head size, block size and ratio of heads to KV heads, and groups that divide no tile.
SHAPES = [
    (heads(4, 2, 64), 8),
    (heads(2, 2, 80), 16),
    (heads(3, 1, 96), 32),
    (heads(5, 1, 128), 64),
    (heads(7, 1, 192), 16),
    (heads(2, 1, 256), 128),
    (heads(20, 1, 64), 128),
]


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(("shape", "block_size"), SHAPES, ids=str)
def test_shapes_agree_with_float64(shape: HeadShape, block_size: int, batch_invariant: bool) -> None:
    check(Step(rows=((1, 129), (19, 70), (2, 9)), heads=shape, block_size=block_size, batch_invariant=batch_invariant))


OPTIONS = {
    "none": Options(),
    "window": Options(window=37),
    "window of one": Options(window=1),
    "chunks": Options(attention_chunk=50),
    "soft cap": Options(soft_cap=2.0),
    "sinks": Options(sinks=True),
    "a scale": Options(num_scales=1),
    "a scale per head": Options(num_scales=2),
    "all": Options(window=90, soft_cap=2.0, sinks=True, num_scales=2),
}


@pytest.mark.parametrize(
    ("options", "batch_invariant"),
    [
        pytest.param(options, batch_invariant, id=f"{name}-{batch_invariant}")
        for name, options in OPTIONS.items()
        # One path is enough where both share their code.
        for batch_invariant in ((False, True) if name in ("none", "window", "chunks", "all") else (False,))
    ],
)
def test_options_agree_with_float64(options: Options, batch_invariant: bool) -> None:
    check(Step(rows=MIXED, options=options, batch_invariant=batch_invariant))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [Options(), Options(num_scales=2)], ids=["same cache", "e4m3"])
def test_dtypes_agree_with_float64(dtype: torch.dtype, options: Options) -> None:
    check(Step(rows=MIXED, dtype=dtype, options=options))


@pytest.mark.parametrize("head_size", [64, 80, 128])
def test_pairs_of_e4m3_and_single_numbers_agree_with_float64(head_size: int) -> None:
    """Both forms of a decode, whole and split, and drafts; a head size that tiles pad, too."""
    step = Step(
        rows=((1, 129), (3, 66), (1, 400)),
        heads=heads(4, 2, head_size),
        dtype=torch.bfloat16,
        most_queries=3,
        options=Options(num_scales=2),
    )
    for pairs in (True, False):
        for num_programs in (1, 64):
            check(step.but(pairs=pairs, num_programs=num_programs))


def test_splitting_changes_no_bit() -> None:
    """v1, v2, and a workspace with room for some rows only give the same bits, so the GPU may choose by speed alone."""
    step = Step(rows=((1, 400), (1, 20), (2, 300), (1, 257)), options=Options(sinks=True))
    schedules = {
        "one pass": step.but(num_programs=1).schedule(),
        "split": step.but(num_programs=64).schedule(),
        "no room": step.but(num_programs=64, workspace_bytes=0).schedule(),
        "room for some": step.but(num_programs=64, workspace_bytes=8 * 4 * 4 * 66).schedule(),
    }
    results = {name: step.run(schedule) for name, schedule in schedules.items()}
    num_partials = {name: int(schedule.starts[PARTIALS.value, 4]) for name, schedule in schedules.items()}
    assert num_partials == {"one pass": 0, "split": 4 + 6 + 3, "no room": 0, "room for some": 4}
    for result in results.values():
        assert torch.equal(result, results["split"])


def test_splitting_an_e4m3_cache_changes_no_bit() -> None:
    step = Step(rows=((1, 400), (1, 20), (2, 300)), options=Options(num_scales=1))
    assert torch.equal(step.but(num_programs=64).run(), step.but(num_programs=64, workspace_bytes=0).run())


def test_chunk_sizes_agree() -> None:
    step = Step(rows=((1, 700), (20, 390)))
    results = [step.but(chunk=chunk, num_programs=64).run() for chunk in (128, 256, 512)]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_where_blocks_lie_changes_no_bit(batch_invariant: bool) -> None:
    step = Step(rows=((1, 129), (18, 70), (2, 9)), batch_invariant=batch_invariant)
    expected = step.run()
    assert torch.equal(step.but(table_seed=1).run(), expected)
    for block_size in (8, 32, 64, 128):
        assert torch.equal(step.but(block_size=block_size).run(), expected), block_size


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_row_alone_is_the_row_in_a_batch(batch_invariant: bool) -> None:
    step = Step(rows=MIXED, batch_invariant=batch_invariant, options=Options(window=150))
    together = step.run()
    for row, shape in enumerate(step.rows):
        alone = step.but(rows=(shape,), seeds=(row + 1,)).run()
        assert torch.equal(together[step.query_starts[row] : step.query_starts[row + 1]], alone), shape


def test_a_row_with_drafts_has_the_bits_of_decodes_one_by_one() -> None:
    """One tile has all queries of such a row, and reads its keys and values once, whole or in chunks."""
    step = Step(rows=((5, 150), (1, 20)), most_queries=5)
    schedule = step.but(num_programs=64).schedule()
    assert schedule.queries_per_tile >= 5
    together = step.run(schedule)
    # Two rows of one tile each, the first of which is split in two chunks.
    assert schedule.starts[WORK.value, :3].tolist() == [0, 2, 3]
    assert torch.equal(step.run(), together)
    for query in range(5):
        alone = step.but(rows=((1, 146 + query),), seeds=(1,)).run()
        assert torch.equal(alone, together[query : query + 1]), query


@pytest.mark.parametrize(
    "options",
    [Options(), Options(window=40, num_scales=1), Options(attention_chunk=64)],
    ids=["plain", "window, e4m3", "chunks"],
)
def test_chunked_prefill_and_decode_are_one_pass_bit_by_bit(options: Options) -> None:
    """Resuming relies on this: a prefill reproduces tokens that were decoded one by one."""
    step = Step(rows=((150, 150),), options=options, batch_invariant=True)
    at_once = step.run()
    for first, end in itertools.pairwise((0, 70, 127, 128, 129, 130, 150)):
        part = step.but(rows=((end - first, end),))
        assert torch.equal(part.run(), at_once[first:end]), (first, end)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_padding_is_inert(batch_invariant: bool) -> None:
    """Rows without queries, rows with an empty context, and tokens behind the last row, as in graphs."""
    real = Step(rows=((1, 140), (21, 40)), batch_invariant=batch_invariant)
    padded = real.but(rows=((1, 140), (0, 0), (21, 40), (1, 0), (1, 0)), seeds=(1, 8, 2, 9, 10))
    out = padded.run()
    assert torch.equal(out[:22], real.run())
    assert torch.equal(out[22:], torch.zeros_like(out[22:]))


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_tables_of_permanent_rows_in_any_order(batch_invariant: bool) -> None:
    """A split decode, a one-pass decode and a prefill whose tables lie among those of other requests; and padding,
    which has no table."""
    step = Step(rows=((1, 400), (21, 40), (1, 30), (1, 0)), num_programs=8, batch_invariant=batch_invariant)
    tables = step.block_tables()
    tables[tables == NO_BLOCK] = 0
    table_rows = torch.tensor([5, 0, 3, -1], dtype=torch.int32, device=DEVICE)
    # Block 0 belongs to no row. A read at table row -1 would find the memory before or behind the tables.
    memory = torch.zeros(9, tables.shape[1] + 3, dtype=torch.int32, device=DEVICE)
    block_tables = memory[1:-1, : tables.shape[1]]
    block_tables[[5, 0, 3]] = torch.from_numpy(tables[:3]).to(DEVICE)
    starts, lens = torch.from_numpy(step.query_starts).to(DEVICE), torch.from_numpy(step.context_lens).to(DEVICE)
    schedule, cache = step.schedule(), step.cache(step.block_tables())
    cache[0] = 1.0
    schedule.update(starts, lens)
    out = paged_attention(
        step.queries(),
        cache,
        query_starts=starts,
        context_lens=lens,
        block_tables=block_tables,
        table_rows=table_rows,
        scale=SCALE,
        schedule=schedule,
    )
    assert torch.equal(out, step.run())
    with pytest.raises(ValueError, match=r"table_rows is torch.int64 \(4,\): torch.int32 \(4,\)"):
        paged_attention(
            step.queries(),
            cache,
            query_starts=starts,
            context_lens=lens,
            block_tables=block_tables,
            table_rows=table_rows.long(),
            scale=SCALE,
            schedule=schedule,
        )


def test_tokens_behind_the_last_row_are_left_alone() -> None:
    step = Step(rows=((1, 30), (19, 19)))
    tables = step.block_tables()
    starts, lens = torch.from_numpy(step.query_starts).to(DEVICE), torch.from_numpy(step.context_lens).to(DEVICE)
    q_THD = torch.cat((step.queries(), torch.full((3, 4, 64), float("nan"), device=DEVICE)))
    out = torch.full_like(q_THD, 7.0)
    schedule = step.schedule()
    schedule.update(starts, lens)
    paged_attention(
        q_THD,
        step.cache(tables),
        query_starts=starts,
        context_lens=lens,
        block_tables=torch.from_numpy(tables).to(DEVICE),
        scale=SCALE,
        schedule=schedule,
        out=out,
    )
    assert torch.equal(out[:20], step.run())
    assert (out[20:] == 7.0).all()


def test_a_schedule_serves_step_after_step() -> None:
    """A larger step leaves nothing behind in the schedule's memory, which a captured graph keeps for good."""
    large = Step(rows=((1, 300), (1, 200), (18, 30)), num_programs=16)
    schedule = large.schedule()
    for rows in (large.rows, ((1, 10), (2, 5), (0, 0)), ((18, 30), (1, 1), (1, 300))):
        step = large.but(rows=rows)
        assert torch.equal(step.run(schedule), step.run())


def test_offsets_beyond_int32() -> None:
    """The row uses the last block of a cache of more than 2^31 numbers, few of which are ever touched."""
    step = Step(rows=((1, 100),), heads=heads(1, 1, 256), block_size=128, options=Options(num_scales=1))
    num_blocks = (1 << 31) // (2 * 128 * 256) + 8
    cache = torch.empty(num_blocks, 2, 1, 128, 256, dtype=torch.float8_e4m3fn, device=DEVICE)
    tables = step.block_tables()
    cache[-1] = step.cache(tables)[tables[0, 0]]
    starts, lens, last = (
        torch.tensor(numbers, dtype=torch.int32, device=DEVICE) for numbers in ([0, 1], [100], [[num_blocks - 1]])
    )
    schedule = step.schedule()
    schedule.update(starts, lens)
    out = paged_attention(
        step.queries(),
        cache,
        query_starts=starts,
        context_lens=lens,
        block_tables=last,
        scale=SCALE,
        schedule=schedule,
        **step.layer(),
    )
    assert torch.equal(out, step.run())


def test_queries_may_be_slices() -> None:
    step = Step(rows=((1, 30), (19, 19)))
    tables = step.block_tables()
    starts, lens = torch.from_numpy(step.query_starts).to(DEVICE), torch.from_numpy(step.context_lens).to(DEVICE)
    qkv = torch.full((20, 8, 64), float("nan"), device=DEVICE)
    qkv[:, :4] = step.queries()
    schedule = step.schedule()
    schedule.update(starts, lens)
    out = paged_attention(
        qkv[:, :4],
        step.cache(tables),
        query_starts=starts,
        context_lens=lens,
        block_tables=torch.from_numpy(tables).to(DEVICE),
        scale=SCALE,
        schedule=schedule,
    )
    assert torch.equal(out, step.run())


def _work(rows: list[tuple[int, int]], num_programs: int) -> AttentionSchedule:
    step = Step(rows=tuple(rows), num_programs=num_programs, chunk=512)
    schedule = step.schedule()
    schedule.update(torch.from_numpy(step.query_starts).to(DEVICE), torch.from_numpy(step.context_lens).to(DEVICE))
    return schedule


def test_the_gpu_chooses_by_programs_batch_and_context() -> None:
    """Long contexts are split only when programs would otherwise be idle; but a context much longer than the others is
    split however many others there are."""
    chunks = _work([(1, 16_000)] * 2, num_programs=264).starts[WORK.value].tolist()
    assert chunks[:3] == [0, 32, 64]
    chunks = _work([(1, 2_000)] * 300, num_programs=16).starts
    assert chunks[WORK.value, 300] == 300
    assert chunks[PARTIALS.value, 300] == 0
    chunks = _work([(1, 1_000)] * 300 + [(1, 100_000)], num_programs=16).starts[WORK.value].tolist()
    assert chunks[300:302] == [300, 300 + 196]


def test_rows_beyond_a_block_of_the_schedule() -> None:
    """Sums carry over from each block of 1,024 rows to the next."""
    rows = [(1 + row % 3 * 20, 50 + row) for row in range(2_100)]
    starts = _work(rows, num_programs=4).starts
    assert starts[WORK.value, 2_100] == 700
    assert starts[PREFILL.value, 2_100] == 1_400
    assert (starts[:, 1:] >= starts[:, :-1]).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": heads(5, 2, 64)}, "equally many"),
        ({"chunk": 100}, "multiple of 128"),
        ({"options": Options(window=-1)}, "window -1"),
        ({"options": Options(attention_chunk=-1)}, "attention_chunk -1"),
        ({"heads": heads(4, 2, 72)}, "head size 72 is none of 64"),
        ({"block_size": 4}, "block_size 4 is none of 8"),
    ],
)
def test_errors_name_what_would_work(changes: dict[str, object], message: str) -> None:
    step = Step(rows=((1, 5),)).but(**changes)
    with pytest.raises(ValueError, match=message):
        step.run()
