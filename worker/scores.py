"""What a model's head says where rows sample: logits, or, where nobody asks for more, the likeliest tokens alone.

Shape suffixes: L positions whose tokens are wanted, E hidden size, V vocabulary.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch


class Head(Protocol):
    """Of a model."""

    def logits(self, hidden_SE: torch.Tensor) -> torch.Tensor:
        """Float32 logits [S, V] of some tokens, a tensor that the caller may change."""
        ...

    def greedy(self, hidden_SE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest token (int64 [S]) and its logit (float32 [S]) after each, as kernels.sampling.greedy says of
        `logits`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Logits:
    """logits_LV: float32, contiguous; changed in place where rows have penalties."""

    logits_LV: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Greedy:
    """token_ids_L: int64, the likeliest. largest_L: float32, their logits."""

    token_ids_L: np.ndarray
    largest_L: np.ndarray


Scores = Logits | Greedy


def score(head: Head, hidden_LE: torch.Tensor, *, with_logits: bool) -> Scores:
    """With logits for all, or for none: reading the head's weights twice costs more than some rows' logits."""
    if with_logits:
        return Logits(logits_LV=head.logits(hidden_LE).numpy())
    token_ids_L, largest_L = head.greedy(hidden_LE)
    return Greedy(token_ids_L=token_ids_L.numpy(), largest_L=largest_L.numpy())
