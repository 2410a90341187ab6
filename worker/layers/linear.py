"""Linear layers as models have them: by the names of their weights, several fused into one where inputs are shared."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from kernels.compute_path import ComputePath
from kernels.linear import PackedLinear
from kernels.linear.weights import Weight, concatenate, map_rows
from worker.take_tensor import TakeTensor


def load_linear(
    take: TakeTensor,
    names: Sequence[str],
    *,
    bias: bool,
    path: ComputePath,
    norm: str | None = None,
    eps: float = 0.0,
    gated: bool = False,
    reorder: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, rows: rows,
) -> PackedLinear:
    """The layers `names` as one whose outputs lie side by side; `reorder` may move the outputs (dim 0) of each.

    norm: name of the RMS norm (with `eps`) that the input goes through first. gated: of two layers, the first is the
    gate of the second.
    """

    def weight() -> Weight:
        return concatenate([map_rows(take.weight(f"{name}.weight"), partial(reorder, name)) for name in names])

    bias_O = torch.cat([reorder(name, take(f"{name}.bias")) for name in names]) if bias else None
    norm_I = take(f"{norm}.weight").float() if norm else None
    return _packed(take, [f"{name}.weight" for name in names], weight, bias_O, path, norm_I, eps, gated=gated)


def load_head(take: TakeTensor, name: str, *, path: ComputePath, norm: str, eps: float) -> PackedLinear:
    """The output head, behind the model's last norm. name: of its weights, which may be the embeddings'."""
    norm_I = take(norm).float()
    return _packed(take, [name], lambda: take.head_weight(name), None, path, norm_I, eps, gated=False)


def _packed(
    take: TakeTensor,
    names: Sequence[str],
    weight: Callable[[], Weight],
    bias_O: torch.Tensor | None,
    path: ComputePath,
    norm_I: torch.Tensor | None,
    eps: float,
    *,
    gated: bool,
) -> PackedLinear:
    """Of weights that an earlier start has packed, or of `weight()`."""
    kept = take.packed(names)
    linear = PackedLinear(weight() if kept is None else kept, bias_O, path, norm_I=norm_I, eps=eps, gated=gated)
    if kept is None and linear.packed is not None:
        take.keep(names, linear.packed)
    return linear
