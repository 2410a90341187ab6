"""A mask of the library's is recognised by what it hides, or not at all."""

from collections.abc import Callable

import pytest
import torch
from transformers.masking_utils import causal_mask_function, or_masks, sliding_window_causal_mask_function

from worker.model_config import AttentionSpan
from worker.models.library.attention import find_span


def _chunks(size: int) -> Callable[..., bool]:
    return lambda batch, head, query, key: (key <= query) & (query // size == key // size)


@pytest.mark.parametrize(
    ("mask", "span"),
    [
        (causal_mask_function, AttentionSpan()),
        (sliding_window_causal_mask_function(1), AttentionSpan(1, 0)),
        (sliding_window_causal_mask_function(11), AttentionSpan(11, 0)),
        (sliding_window_causal_mask_function(4096), AttentionSpan(4096, 0)),
        (_chunks(7), AttentionSpan(0, 7)),
        (_chunks(8192), AttentionSpan(0, 8192)),
        # All see the first token, and a window: neither a window nor chunks.
        (
            or_masks(sliding_window_causal_mask_function(5), lambda batch, head, query, key: key == 0),
            None,
        ),
        (lambda batch, head, query, key: torch.tensor(True), None),
    ],
)
def test_spans_of_masks(mask: Callable[..., bool], span: AttentionSpan | None) -> None:
    assert find_span(mask) == span
