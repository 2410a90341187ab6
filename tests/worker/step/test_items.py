"""Which tokens of a step embeddings replace, and which positions rope rotates by."""

import numpy as np
import pytest
import torch

from protos import step_pb2
from worker.errors import PlanError
from worker.step.items import ItemRows, ItemTokens

IMAGE, VIDEO, BREAK = 90, 91, 92
TOKENS = ItemTokens(embedded=frozenset({IMAGE, VIDEO}), has_axes=True)


def rows(*new: step_pb2.NewRow, has_axes: bool = True) -> ItemRows:
    items = ItemRows(ItemTokens(embedded=TOKENS.embedded, has_axes=has_axes), 8)
    for each in new:
        items.fill(each, np.array(each.token_ids[: each.num_prompt_tokens], np.int64))
    return items


def row(number: int, tokens: list[int], *items: step_pb2.RowItem, num_prompt_tokens: int = 0) -> step_pb2.NewRow:
    count = num_prompt_tokens or len(tokens)
    return step_pb2.NewRow(row=number, token_ids=tokens, num_prompt_tokens=count, items=items)


def image(number: int, first: int, *grid: int, time_step: float = 0.0) -> step_pb2.RowItem:
    count = int(np.prod(grid))
    return step_pb2.RowItem(number=number, first_token=first, num_tokens=count, grid=grid, time_step=time_step)


def step(items: ItemRows, *parts: tuple[int, int, int]):
    """parts: (row, first token, number of tokens)."""
    counts = [count for _, _, count in parts]
    starts = np.array([0, *np.cumsum(counts)])
    positions = np.concatenate([np.arange(first, first + count) for _, first, count in parts])
    return items.of_step(np.array([number for number, _, _ in parts]), starts, positions)


# Two tokens of text, an image of 2 x 3, one of text, a video of 2 x 1 x 2 whose steps are 5 apart, two of text.
PROMPT = [1, 2, *[IMAGE] * 6, 3, *[VIDEO] * 4, 4, 5]
ROW = row(3, [*PROMPT, 6, 7, 8], image(11, 2, 1, 2, 3), image(12, 9, 2, 1, 2, time_step=5.0), num_prompt_tokens=15)
TIME = [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 6, 11, 11, 8, 9]
HEIGHT = [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 6, 6, 6, 8, 9]
WIDTH = [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 6, 7, 8, 9]


def test_positions_and_embeddings_of_every_chunk():
    items = rows(ROW)
    for first in range(15):
        for end in range(first + 1, 19):
            found = step(items, (3, first, end - first))
            assert found is not None
            assert found.positions_AT is not None
            # Behind the prompt they go on from its end, though the video's last frame is further on.
            outputs = [10, 11, 12]
            assert found.positions_AT.tolist() == [(axis + outputs)[first:end] for axis in (TIME, HEIGHT, WIDTH)]
            places, parts = [], []
            for item, start, stop in ((11, 2, 8), (12, 9, 13)):
                low, high = max(first, start), min(end, stop)
                places += [place - first for place in range(low, high)]
                parts += [(item, low - start, high - start)] if low < high else []
            assert (found.embedded is None) == (not parts)
            if found.embedded is not None:
                assert found.embedded.places_M.tolist() == places
                assert list(found.embedded.parts) == parts


def test_tokens_after_the_prompt_are_shifted_and_nothing_else():
    items = rows(ROW)
    assert step(items, (3, 15, 1)) is None
    assert step(items, (3, 15, 3)) is None
    assert items.shift_R.tolist() == [0, 0, 0, -5, 0, 0, 0, 0]
    items.free(3)
    assert not items.has_any
    assert not items.shift_R.any()
    assert step(items, (3, 0, 5)) is None


def test_rows_of_a_step_keep_apart():
    items = rows(ROW, row(5, [IMAGE, IMAGE, 9], image(13, 0, 1, 1, 2)))
    found = step(items, (1, 70, 1), (5, 1, 2), (3, 16, 1), (3, 7, 3))
    assert found is not None
    assert found.positions_AT is not None
    assert found.positions_AT.tolist() == [[70, 0, 2, 11, 2, 5, 6], [70, 0, 2, 11, 3, 5, 6], [70, 1, 2, 11, 4, 5, 6]]
    assert found.embedded is not None
    assert found.embedded.places_M.tolist() == [1, 4, 6]
    assert list(found.embedded.parts) == [(13, 1, 2), (11, 5, 6), (12, 0, 1)]


def test_tokens_between_the_parts_of_an_image_are_the_models_own():
    tokens = [1, IMAGE, IMAGE, BREAK, IMAGE, IMAGE, 2]
    item = step_pb2.RowItem(number=4, first_token=1, num_tokens=5)
    items = rows(row(0, tokens, item), has_axes=False)
    found = step(items, (0, 2, 3))
    assert found is not None
    assert found.positions_AT is None
    assert found.embedded is not None
    assert found.embedded.places_M.tolist() == [0, 2]
    assert list(found.embedded.parts) == [(4, 1, 3)]
    # Behind its last embedding nothing is special.
    assert step(items, (0, 6, 1)) is None


def test_an_item_without_embeddings_in_its_tokens_needs_none():
    items = rows(row(0, [1, BREAK, 2], step_pb2.RowItem(number=4, first_token=1, num_tokens=1)), has_axes=False)
    assert step(items, (0, 0, 3)) is None


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([image(1, 2, 1, 2, 3), image(2, 7, 1, 1, 2)], "item 2 of row 3 has tokens 7 to 9; items follow each other"),
        ([image(1, 12, 1, 2, 3)], "item 1 of row 3 has tokens 12 to 18; items follow each other within 15 prompt"),
        ([step_pb2.RowItem(number=1, first_token=2)], "item 1 of row 3 has tokens 2 to 2"),
        (
            [step_pb2.RowItem(number=1, first_token=2, num_tokens=6)],
            "items of row 3: an item has 6 tokens and the grid",
        ),
    ],
)
def test_items_that_do_not_fit_their_prompt(items: list[step_pb2.RowItem], message: str):
    with pytest.raises(PlanError, match=message):
        rows(row(3, [*PROMPT], *items))


def test_axes_take_their_columns_of_the_tables():
    """Each pair of numbers turns by the position on its axis, with the bits that this position gives to text."""
    from kernels.backend import torch_backend
    from kernels.cpu_backend import cpu_backend
    from worker.layers.forward_context import Workspace
    from worker.layers.rotary import Rotary
    from worker.model_config import RopeConfig

    for backend in (torch_backend(torch.float32), cpu_backend(torch.float32, 16)):
        rotary = Rotary([RopeConfig(theta=10000.0)], 16, backend, sections=(2, 3, 3))
        workspace = Workspace(backend)
        workspace.reserve(8)
        positions_AT = torch.tensor([[5, 6, 7], [1, 2, 30], [4, 40, 400]])
        of_axes = [rotary(positions_T.clone(), workspace)[0].clone() for positions_T in positions_AT]
        [mixed] = rotary(positions_AT, workspace)
        for axis, columns in enumerate((slice(0, 2), slice(2, 5), slice(5, 8))):
            assert torch.equal(mixed[..., columns], of_axes[axis][..., columns])
