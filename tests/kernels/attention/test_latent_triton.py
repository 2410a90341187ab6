"""MLA for GPUs: against float64, and variations that must not change a bit.

Every step's cache holds NaN outside of the contexts, block tables name no block there, and outputs and the schedule's
memory start as NaN.
"""

import itertools

import pytest
import torch

from kernels.attention.latent.triton import LatentShape, mla_attention
from kernels.attention.latent.triton_schedule import WIDE_FITS, mla_tiles
from kernels.attention.triton_schedule import PARTIALS, WORK
from tests.support.gpu.gpu import DEVICE
from tests.support.gpu.mla_attention_gpu import SCALE, Step

# Decodes up to and beyond tiles of 64 and chunks of 128, drafts, a prompt, a chunk after a prefix.
MIXED = ((1, 1), (1, 129), (3, 66), (9, 9), (4, 140))
# float32 kernels add up a few hundred numbers of size 1, on a GPU one after the other; bf16 rounds weights and results
# by 2^-9 each, fp16 by 2^-12.
TOLERANCES = {torch.float32: 2e-6 if DEVICE == "cpu" else 1e-5, torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}


def shape(num_heads: int, latent_size: int = 64, rope_size: int = 16) -> LatentShape:
    return LatentShape(num_heads=num_heads, latent_size=latent_size, rope_size=rope_size)


def check(step: Step) -> None:
    tolerance = TOLERANCES[step.dtype]
    torch.testing.assert_close(step.run().cpu().double(), step.expected(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("sizes", "block_size"),
    [(shape(1), 8), (shape(16, 128, 32), 32), (shape(20), 64), (shape(5, 512, 64), 128)],
    ids=str,
)
def test_shapes_agree_with_float64(sizes: LatentShape, block_size: int) -> None:
    check(Step(rows=((1, 129), (3, 40)), shape=sizes, block_size=block_size))


@pytest.mark.parametrize("kv_scale", [None, 0.7], ids=["same cache", "e4m3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_agree_with_float64(dtype: torch.dtype, kv_scale: float | None) -> None:
    check(Step(rows=MIXED, dtype=dtype, kv_scale=kv_scale))


def test_an_e4m3_cache_folded_in_memory_and_split() -> None:
    """Contexts of several chunks, whose columns lie in memory with the even ones first, in one program or many."""
    step = Step(rows=((1, 400), (2, 300)), dtype=torch.bfloat16, kv_scale=0.7)
    assert torch.equal(step.but(num_programs=64).run(), step.but(num_programs=64, workspace_bytes=0).run())
    check(step)


@pytest.mark.parametrize("num_heads", [17, 70])
def test_groups_of_heads_on_wide_tiles(num_heads: int) -> None:
    """Several groups of heads, as 128 heads form them; each group has the lanes of a tile to itself."""
    step = Step(rows=((1, 270), (2, 20)), shape=shape(num_heads), dtype=torch.bfloat16)
    schedule = step.schedule()
    # Triton 3.6 has narrow tiles alone.
    if not WIDE_FITS:
        pytest.skip("this Triton has no wide tiles")
    assert schedule.decode.lanes == 64
    assert schedule.heads.num_kv_heads == {17: 1, 70: 2}[num_heads]
    check(step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_splitting_changes_no_bit(dtype: torch.dtype) -> None:
    """One program per chunk; one for all chunks, for lack of room for partial sums; and room for some rows only."""
    step = Step(rows=((1, 400), (1, 20), (2, 300), (1, 257)), dtype=dtype, queries_per_tile=6)
    row_bytes = 4 * 3 * (64 + 2)
    schedules = {
        "split": step.but(num_programs=64).schedule(),
        "no room": step.but(num_programs=64, workspace_bytes=0).schedule(),
        "room for some": step.but(num_programs=64, workspace_bytes=5 * row_bytes).schedule(),
    }
    results = {name: step.run(schedule) for name, schedule in schedules.items()}
    num_partials = {name: int(schedule.starts[PARTIALS.value, 4]) for name, schedule in schedules.items()}
    assert num_partials == {"split": 4 + 6 + 3, "no room": 0, "room for some": 4}
    for name, result in results.items():
        assert torch.equal(result, results["split"]), name


def test_chunk_sizes_agree() -> None:
    step = Step(rows=((1, 500), (3, 390)), num_programs=64)
    results = [step.but(chunk=chunk).run() for chunk in (128, 256, 512)]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=2e-6, atol=2e-6)


def test_where_blocks_lie_changes_no_bit() -> None:
    step = Step(rows=((1, 129), (4, 70), (2, 9)))
    expected = step.run()
    assert torch.equal(step.but(table_seed=1).run(), expected)
    for block_size in (8, 32, 64, 128):
        assert torch.equal(step.but(block_size=block_size).run(), expected), block_size


def test_a_row_alone_is_the_row_in_a_batch() -> None:
    step = Step(rows=MIXED)
    together = step.run()
    for row, rows in enumerate(step.rows):
        alone = step.but(rows=(rows,), seeds=(row + 1,)).run()
        assert torch.equal(together[step.query_starts[row] : step.query_starts[row + 1]], alone), rows


@pytest.mark.parametrize(("dtype", "kv_scale"), [(torch.float32, None), (torch.bfloat16, 0.7)], ids=["fp32", "e4m3"])
def test_chunked_prefill_and_decode_are_one_pass_bit_by_bit(dtype: torch.dtype, kv_scale: float | None) -> None:
    """Resuming relies on this: a prefill reproduces tokens that were decoded one by one."""
    step = Step(rows=((140, 140),), shape=shape(2), dtype=dtype, kv_scale=kv_scale, queries_per_tile=8)
    at_once = step.run()
    for first, end in itertools.pairwise((0, 70, 127, 128, 129, 130, 140)):
        part = step.but(rows=((end - first, end),))
        assert torch.equal(part.run(), at_once[first:end]), (first, end)


@pytest.mark.parametrize("has_table_rows", [False, True])
def test_padding_is_inert(has_table_rows: bool) -> None:
    """Rows without queries, rows with an empty context, and tables at the places of permanent rows."""
    real = Step(rows=((1, 140), (5, 40)))
    padded = real.but(
        rows=((1, 140), (0, 0), (5, 40), (1, 0), (1, 0)), seeds=(1, 8, 2, 9, 10), has_table_rows=has_table_rows
    )
    out = padded.run()
    assert torch.equal(out[:6], real.run())
    assert torch.equal(out[6:], torch.zeros_like(out[6:]))


def test_a_schedule_serves_step_after_step() -> None:
    """A larger step leaves nothing behind in the schedule's memory, which a captured graph keeps for good."""
    large = Step(rows=((1, 300), (1, 200), (4, 30)), num_programs=16)
    schedule = large.schedule()
    for rows in (large.rows, ((1, 10), (2, 5), (0, 0)), ((4, 30), (1, 1), (1, 300))):
        step = large.but(rows=rows)
        assert torch.equal(step.run(schedule), step.run())


def test_tokens_of_no_row_are_left_alone_and_queries_may_be_slices() -> None:
    step = Step(rows=((1, 30), (4, 19)))
    tables = step.block_tables()
    starts, lens = torch.from_numpy(step.query_starts).to(DEVICE), torch.from_numpy(step.context_lens).to(DEVICE)
    wide = torch.full((8, 6, 80), float("nan"), device=DEVICE)
    wide[:5, :3] = step.queries()
    out = torch.full((8, 3, 64), 7.0, device=DEVICE)
    schedule = step.schedule()
    schedule.update(starts, lens)
    mla_attention(
        wide[:, :3],
        step.cache(tables),
        query_starts=starts,
        context_lens=lens,
        block_tables=torch.from_numpy(tables).to(DEVICE),
        scale=SCALE,
        schedule=schedule,
        out=out,
    )
    assert torch.equal(out[:5], step.run())
    assert (out[5:] == 7.0).all()


def test_offsets_beyond_int32() -> None:
    """The row uses the last block of a cache of more than 2^31 numbers, few of which are ever touched."""
    step = Step(rows=((1, 100),), shape=shape(1, 512, 64), block_size=128, dtype=torch.bfloat16, kv_scale=1.0)
    num_blocks = (1 << 31) // (128 * 576) + 8
    cache = torch.empty(num_blocks, 128, 576, dtype=torch.float8_e4m3fn, device=DEVICE)
    tables = step.block_tables()
    cache[-1] = step.cache(tables)[tables[0, 0]]
    starts, lens, last = (
        torch.tensor(numbers, dtype=torch.int32, device=DEVICE) for numbers in ([0, 1], [100], [[num_blocks - 1]])
    )
    schedule = step.schedule()
    schedule.update(starts, lens)
    out = mla_attention(
        step.queries(),
        cache,
        query_starts=starts,
        context_lens=lens,
        block_tables=last,
        scale=SCALE,
        schedule=schedule,
        kv_scale=step.scale_tensor(),
    )
    assert torch.equal(out, step.run())


def test_the_gpu_chooses_by_programs_batch_and_context() -> None:
    """Long contexts are split only when programs would otherwise be idle."""

    def starts(rows: list[tuple[int, int]], num_programs: int) -> torch.Tensor:
        step = Step(rows=tuple(rows), num_programs=num_programs, chunk=512, shape=LatentShape(num_heads=16))
        schedule = step.but(dtype=torch.bfloat16, workspace_bytes=16 << 20).schedule()
        schedule.update(torch.from_numpy(step.query_starts).to(DEVICE), torch.from_numpy(step.context_lens).to(DEVICE))
        return schedule.starts

    assert starts([(1, 16_000)] * 2, num_programs=264)[WORK.value].tolist()[:3] == [0, 32, 64]
    balanced = starts([(1, 2_000)] * 300, num_programs=16)
    assert balanced[WORK.value, 300] == 300
    assert balanced[PARTIALS.value, 300] == 0


@pytest.mark.parametrize("arch", [80, 89, 90, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_chunks_are_whole_tiles(arch: int, dtype: torch.dtype) -> None:
    """If a tile spanned two chunks, results would depend on where a context is split."""
    tiles = mla_tiles(LatentShape(num_heads=128), dtype, arch)
    assert 128 % tiles.tokens == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": shape(3, 96)}, "latent size 96: powers of two from 64"),
        ({"shape": shape(3, 1024)}, "512 and 64 are the most"),
        ({"chunk": 100}, "multiple of 128"),
        ({"block_size": 4}, "block_size 4 is none of 8"),
    ],
)
def test_errors_name_what_would_work(changes: dict[str, object], message: str) -> None:
    step = Step(rows=((1, 5),)).but(**changes)
    with pytest.raises(ValueError, match=message):
        step.run()
