"""Linear layers as models have them: by the names of their weights, several fused into one where inputs are shared."""

from collections.abc import Callable, Sequence

import torch

from kernels.linear import GemmPath, PackedLinear
from worker.take_tensor import TakeTensor


def load_linear(
    take: TakeTensor,
    names: Sequence[str],
    *,
    bias: bool,
    path: GemmPath,
    reorder: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, rows: rows,
) -> PackedLinear:
    """The layers `names` as one whose outputs lie side by side; `reorder` may move the outputs (dim 0) of each."""
    weight = torch.cat([reorder(name, take(f"{name}.weight")) for name in names])
    bias_O = torch.cat([reorder(name, take(f"{name}.bias")) for name in names]) if bias else None
    return PackedLinear(weight, bias_O, path)
