"""Positions with three axes (M-RoPE, arXiv 2409.12191, section 2.1): time, height and width of images and videos."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np


# Messages of two protocols have these fields, and the scheduler's record of an item.
class Span(Protocol):
    """Where an item's tokens are; protos/inference.proto: ItemSpan, and protos/step.proto: RowItem."""

    @property
    def first_token(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def grid(self) -> Sequence[int]: ...
    @property
    def time_step(self) -> float: ...


def mrope_positions(num_tokens: int, items: Iterable[Span]) -> tuple[np.ndarray, int]:
    """Returns the positions of a sequence's tokens, int32 [3, num_tokens] (time, height, width), and what to add to the
    place of each later token to get its position, the same on all axes.

    As get_rope_index of transformers 5.23: tokens of text have equal positions on all axes; an item begins where
    the text before it ended, and the text after it begins as far on as the item is high or wide, whatever its time.
    Later tokens go on from there, as in transformers' generate(), so that a token's position does not depend on where
    the prompt ends: cached KV is valid for longer prompts, too. (The rope_deltas of get_rope_index differ: with them,
    tokens would begin behind a long video's positions in time.) items: in order, each with a grid that has as many
    places as the item has tokens. Raises ValueError for items that do not fit.
    """
    positions = np.empty((3, num_tokens), np.int32)
    place = position = 0
    for item in items:
        times, rows, columns = _grid(item)
        end = item.first_token + item.num_tokens
        if not place <= item.first_token <= end <= num_tokens:
            raise ValueError(
                f"an item has tokens {item.first_token} to {end}: items must follow each other within {num_tokens} "
                "tokens"
            )
        text = item.first_token - place
        positions[:, place : place + text] = np.arange(position, position + text, dtype=np.int32)
        position += text
        # In float32, and rounded down, as transformers computes it.
        time = (np.arange(times, dtype=np.float32) * np.float32(item.time_step or 1.0)).astype(np.int32)
        of_item = positions[:, item.first_token : end].reshape(3, times, rows, columns)
        of_item[0] = position + time[:, None, None]
        of_item[1] = position + np.arange(rows, dtype=np.int32)[:, None]
        of_item[2] = position + np.arange(columns, dtype=np.int32)
        position += max(rows, columns)
        place = end
    positions[:, place:] = np.arange(position, position + num_tokens - place, dtype=np.int32)
    return positions, position - place


def _grid(item: Span) -> tuple[int, int, int]:
    if len(item.grid) != 3 or item.grid[0] * item.grid[1] * item.grid[2] != item.num_tokens:
        raise ValueError(
            f"an item has {item.num_tokens} tokens and the grid {list(item.grid)}: it must be three numbers whose "
            "product is the number of tokens"
        )
    times, rows, columns = item.grid
    return times, rows, columns
