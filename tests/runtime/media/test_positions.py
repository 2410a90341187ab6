"""Positions with three axes are those of transformers."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel, Qwen2VLConfig, Qwen2VLModel

from runtime.media.positions import mrope_positions


@dataclass
class _Span:
    first_token: int
    grid: tuple[int, ...]
    time_step: float = 0.0
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_tokens = int(np.prod(self.grid))


def _transformers(num_tokens: int, items: list[_Span], *, of_qwen2_5: bool) -> tuple[np.ndarray, int]:
    """Calls get_rope_index, which needs no more of a model than its config."""
    config: Any = (Qwen2_5_VLConfig if of_qwen2_5 else Qwen2VLConfig)()
    model: Any = object.__new__(Qwen2_5_VLModel if of_qwen2_5 else Qwen2VLModel)
    torch.nn.Module.__init__(model)
    model.config = config
    kinds = torch.zeros(1, num_tokens, dtype=torch.int64)
    grids: dict[int, list[tuple[int, int, int]]] = {1: [], 2: []}
    seconds = []
    for item in items:
        kind = 2 if item.time_step else 1
        times, rows, columns = item.grid
        kinds[0, item.first_token : item.first_token + item.num_tokens] = kind
        grids[kind].append((times, rows * 2, columns * 2))
        if item.time_step:
            seconds.append(item.time_step / config.vision_config.tokens_per_second if of_qwen2_5 else 1.0)
    more = {"second_per_grid_ts": torch.tensor(seconds)} if of_qwen2_5 else {}
    positions, delta = model.get_rope_index(
        torch.zeros(1, num_tokens, dtype=torch.int64),
        mm_token_type_ids=kinds,
        image_grid_thw=torch.tensor(grids[1]) if grids[1] else None,
        video_grid_thw=torch.tensor(grids[2]) if grids[2] else None,
        **more,
    )
    return positions[:, 0].numpy(), int(delta[0, 0])


@pytest.mark.parametrize("of_qwen2_5", [False, True], ids=["qwen2", "qwen2.5"])
@pytest.mark.parametrize(
    ("num_tokens", "items"),
    [
        pytest.param(5, [], id="text"),
        pytest.param(30, [_Span(0, (1, 3, 5))], id="image first"),
        pytest.param(17, [_Span(2, (1, 5, 3))], id="image last"),
        pytest.param(60, [_Span(1, (1, 2, 7)), _Span(16, (1, 3, 3)), _Span(40, (1, 1, 1))], id="images"),
        pytest.param(60, [_Span(4, (3, 2, 4), 1.0), _Span(30, (1, 4, 4))], id="video and image"),
    ],
)
def test_prompts_have_the_positions_of_transformers(num_tokens: int, items: list[_Span], of_qwen2_5: bool) -> None:
    theirs, delta = _transformers(num_tokens, items, of_qwen2_5=of_qwen2_5)
    ours, our_delta = mrope_positions(num_tokens, items)
    assert ours.dtype == np.int32
    assert np.array_equal(ours, theirs)
    # No time goes beyond rows and columns here.
    assert our_delta == delta


@pytest.mark.parametrize("step", [0.5, 0.7, 4.0, 50.0])
def test_videos_of_qwen2_5_space_their_times(step: float) -> None:
    items = [_Span(3, (5, 2, 3), step), _Span(40, (2, 4, 2), step)]
    theirs, _ = _transformers(90, items, of_qwen2_5=True)
    ours, delta = mrope_positions(90, items)
    assert np.array_equal(ours, theirs)
    # Tokens have the same positions whether they belong to the prompt or come after it.
    shorter, delta_of_shorter = mrope_positions(64, items)
    assert np.array_equal(shorter, ours[:, :64])
    assert np.array_equal(ours[:, 64:], np.tile(np.arange(64, 90) + delta_of_shorter, (3, 1)))
    assert delta == delta_of_shorter


@pytest.mark.parametrize(
    "items",
    [
        pytest.param([_Span(8, (1, 2, 2))], id="beyond the end"),
        pytest.param([_Span(4, (1, 2, 2)), _Span(6, (1, 1, 1))], id="overlap"),
        pytest.param([_Span(0, (2, 2))], id="two axes"),
    ],
)
def test_items_that_do_not_fit_are_refused(items: list[_Span]) -> None:
    with pytest.raises(ValueError, match="an item has"):
        mrope_positions(10, items)
