"""A step's batch, made on the device: every token has its own id, position and slot; padding has none."""

import pytest
import torch

from kernels.sampling.triton import SamplingColumns
from kernels.step_inputs import reference
from kernels.step_inputs import triton as gpu
from tests.support.gpu.gpu import DEVICE

NUM_ROWS, TABLE_SIZE, BLOCK_SIZE = 7, 40, 8
# A value that kernels must overwrite and must never use.
STALE = 77777


def ints(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def tables() -> torch.Tensor:
    """Block tables in which no two places hold the same block."""
    return (
        (torch.randperm(NUM_ROWS * TABLE_SIZE, generator=torch.Generator().manual_seed(0)) + 1)
        .to(DEVICE, torch.int32)
        .view(NUM_ROWS, TABLE_SIZE)
    )


def check(
    rows: list[int], num_queries: list[int], contexts: list[int], num_padding: int = 0, shifts: list[int] | None = None
) -> None:
    """Compares a step with the reference. Every third token is a placeholder for the row's last one."""
    starts = [0]
    for count in num_queries:
        starts.append(starts[-1] + count)
    size = starts[-1] + num_padding
    host_tokens = ints([-1 if t % 3 == 0 else 500 + t for t in range(starts[-1])] + [STALE] * num_padding)
    token_ids, positions = (torch.full((size,), STALE, dtype=torch.int32, device=DEVICE) for _ in range(2))
    slots = torch.full((size,), STALE, dtype=torch.int64, device=DEVICE)
    step = (ints(rows), ints(starts), ints(contexts), host_tokens, ints(range(1000, 1000 + NUM_ROWS)), tables())
    shifts_S = None if shifts is None else ints(shifts)
    outputs = {"token_ids_T": token_ids, "positions_T": positions, "slots_T": slots}
    gpu.expand(*step, block_size=BLOCK_SIZE, **outputs, shifts_S=shifts_S)
    expected = reference.expand(*step, block_size=BLOCK_SIZE, shifts_S=shifts_S)
    assert (token_ids.tolist(), positions.tolist(), slots.tolist()) == expected


def test_a_decode_is_the_last_token_of_its_context():
    check([4, 0, 6, 2], [1, 1, 1, 1], [1, 8, 9, 317])


def test_a_chunk_ends_with_its_context():
    """More tokens than one program takes, rows that begin and end within it, chunks that begin within a block."""
    check([3, 1, 5, 0], [5, 130, 1, 60], [5, 270, 44, 61])


@pytest.mark.parametrize("num_rows", range(1, 8))
def test_finds_the_row_of_a_token_for_any_number_of_rows(num_rows: int):
    """A search that is one step short finds a neighbour."""
    check(list(range(num_rows)), [2 + row % 3 for row in range(num_rows)], [20 + 7 * row for row in range(num_rows)])


def test_padding_has_no_token_no_position_and_no_slot():
    """Both kinds of padding: rows of -1, whose stale contexts must not be read, and tokens beyond the last query."""
    check([4, 2, -1, -1], [1, 3, 0, 0], [9, 17, 0, 0], num_padding=5)
    check([4, -1, 2], [2, 3, 1], [9, 17, 30], num_padding=2)
    check([-1, -1], [0, 0], [0, 0], num_padding=2)


def test_shifts_turn_positions_and_leave_slots():
    """Rows whose positions have three axes go on behind an image: at fewer positions than tokens, or at more."""
    check([4, -1, 2, 0], [2, 0, 3, 1], [9, 0, 30, 80], num_padding=2, shifts=[-5, STALE, 0, 40])


def test_tables_change_where_they_are_told_to():
    changed, expected = tables(), tables()
    rows = [6] * 40 + [0] * 40 + [3, 5] * 40
    places = [*range(40), *range(40), *(i // 2 for i in range(80))]
    blocks = list(range(2000, 2160))
    for row, place, block in zip(rows, places, blocks, strict=True):
        expected[row, place] = block
    gpu.write_tables(changed, ints(rows), ints(places), ints(blocks))
    assert torch.equal(changed, expected)
    gpu.write_tables(changed, ints([]), ints([]), ints([]))
    assert torch.equal(changed, expected)


def test_columns_of_new_rows_take_every_bit():
    def columns(size: int, value: int) -> SamplingColumns:
        return SamplingColumns(
            temperature_R=torch.full((size,), 0.1 + value, device=DEVICE),
            top_k_R=ints([value] * size),
            top_p_R=torch.full((size,), 1 / (3 + value), dtype=torch.float64, device=DEVICE),
            min_p_R=torch.full((size,), 0.01 * value, device=DEVICE),
            seed_R=torch.full((size,), -(1 << 62) - value, dtype=torch.int64, device=DEVICE),
            choice_R=ints([-value - 1] * size),
        )

    permanent, old, new = columns(NUM_ROWS, 1), columns(NUM_ROWS, 1), columns(2, 5)
    gpu.write_columns(permanent, ints([6, 2]), new)
    for name in SamplingColumns.__slots__:
        expected = getattr(old, name).clone()
        expected[[6, 2]] = getattr(new, name)
        assert torch.equal(getattr(permanent, name), expected), name


def test_rows_remember_the_last_token_that_they_said():
    last = ints(range(1000, 1000 + NUM_ROWS))
    expected = last.clone()
    rows, sampled, counts = (
        ints([5, -1, 0, 2]),
        ints([[1, 2, STALE], [3, 4, 5], [6, 7, 8], [-1, 9, 9]]),
        ints([2, 3, 3, 1]),
    )
    reference.remember_tokens(expected, rows, sampled, counts)
    gpu.remember_tokens(last, rows, sampled, counts)
    assert torch.equal(last, expected)
    assert last[2] == -1
    gpu.remember_tokens(last, ints([3, -1, 5]), ints([11, 12, -1]))
    expected[3], expected[5] = 11, -1
    assert torch.equal(last, expected)
