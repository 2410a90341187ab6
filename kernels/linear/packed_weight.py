"""What packing makes of a linear layer's weight: to be kept, and taken as it is the next time."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """Good for the C++ kernels of one path, from the same sources. kind: how those number what a weight consists of."""

    kind: int
    num_rows: int
    num_inputs: int
    panels: torch.Tensor  # uint8 [bytes]
