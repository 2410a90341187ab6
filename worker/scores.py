"""What a model's head says where rows sample: logits, or, where nobody asks for more, the likeliest tokens alone.

Shape suffixes: L positions whose tokens are wanted, V vocabulary.
"""

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Logits:
    """logits_LV: float32, contiguous; changed in place where rows have penalties."""

    logits_LV: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Greedy:
    """token_ids_L: int64, the likeliest. largest_L: float32, their logits."""

    token_ids_L: torch.Tensor
    largest_L: torch.Tensor


Scores = Logits | Greedy
