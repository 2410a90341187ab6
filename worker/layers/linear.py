"""Linear layers, loaded by the names of their weights; layers with the same input are fused."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import torch

from kernels.backend import Backend
from kernels.elementwise.silu_mul import Activation
from kernels.linear import PackedLinear
from kernels.linear.weights import Weight, map_rows
from worker.weights.reader import Shape, WeightReader


def load_linear(
    reader: WeightReader,
    names: Sequence[str],
    *,
    bias: bool,
    backend: Backend,
    norm: str | None = None,
    eps: float = 0.0,
    gated: bool = False,
    activation: Activation = "silu",
    reorder: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, rows: rows,
    outputs: Callable[[str], slice] | None = None,
    inputs: slice | None = None,
) -> PackedLinear:
    """Loads the layers `names` as one layer, their outputs side by side; `reorder` may move each layer's outputs
    (dim 0).

    norm: name of the RMS norm (with `eps`) that is applied to the input first. gated: of two layers, the first is the
    gate of the second, through `activation`. outputs: this rank's part of each layer. inputs: this rank's part; the
    results must then be summed over the ranks, and the first rank adds the bias.
    """

    def weight_of(name: str) -> Weight:
        is_part = backend.shard.size > 1
        weight = reader.weight(
            f"{name}.weight", outputs(name) if outputs and is_part else None, inputs if is_part else None
        )
        return map_rows(weight, partial(reorder, name))

    def bias_of(name: str) -> torch.Tensor:
        bias_O = reader(f"{name}.bias")
        return reorder(name, bias_O if outputs is None else bias_O[outputs(name)])

    def weight() -> list[Weight]:
        return [weight_of(name) for name in names]

    has_bias = bias and (inputs is None or backend.shard.is_first)
    bias_O = torch.cat([bias_of(name) for name in names]) if has_bias else None
    norm_I = reader(f"{norm}.weight").float() if norm else None
    stored = [f"{name}.weight" for name in names]
    return _packed(reader, stored, weight, bias_O, backend, norm_I, eps, gated=gated, activation=activation)


def load_head(
    reader: WeightReader,
    name: str,
    *,
    backend: Backend,
    norm: str,
    eps: float,
    outputs: slice | None = None,
    scaling: float = 1.0,
    soft_cap: float = 0.0,
) -> PackedLinear:
    """Loads the output head, fused with the model's last norm. name: its weights, which may be the embeddings'.
    outputs: this rank's part of the vocabulary. scaling: logits are divided by it. soft_cap: see PackedLinear."""
    norm_I = reader(norm).float() / scaling

    def weight() -> Weight:
        return reader.head_weight(name, outputs)

    return _packed(reader, [name], weight, None, backend, norm_I, eps, gated=False, soft_cap=soft_cap)


def _packed(
    reader: WeightReader,
    names: Sequence[str],
    weight: Callable[[], Weight | Sequence[Weight]],
    bias_O: torch.Tensor | None,
    backend: Backend,
    norm_I: torch.Tensor | None,
    eps: float,
    *,
    gated: bool,
    activation: Activation = "silu",
    soft_cap: float = 0.0,
) -> PackedLinear:
    """Makes a layer of weights that an earlier start has packed, or else of `weight()`."""
    kept = reader.packed(names)
    linear = PackedLinear(
        weight() if kept is None else kept,
        bias_O,
        backend,
        norm_I=norm_I,
        eps=eps,
        gated=gated,
        activation=activation,
        soft_cap=soft_cap,
    )
    if kept is None and linear.packed is not None:
        reader.keep(names, linear.packed)
    return linear


def linear_shapes(
    prefix: str, linears: Mapping[str, tuple[int, int]], *, bias: Collection[str] = ()
) -> dict[str, Shape]:
    """Returns the shapes of linear layers' tensors under a prefix. linears: inputs and outputs, by name. bias: the
    layers that have one."""
    shapes: dict[str, Shape] = {}
    for name, (inputs, outputs) in linears.items():
        shapes[f"{prefix}.{name}.weight"] = (outputs, inputs)
        if name in bias:
            shapes[f"{prefix}.{name}.bias"] = (outputs,)
    return shapes


class HeadLinears:
    """One linear layer per head: y[t, h] = weight[h] x[t, h]."""

    def __init__(self, weight_HOI: torch.Tensor, backend: Backend) -> None:
        """weight_HOI: in the model's dtype. Batch-invariant backends multiply heads one by one, because the result of
        a batched matrix product depends on the batch."""
        self._linears: list[PackedLinear] = []
        self._weight_HIO: torch.Tensor | None = None
        if backend.native is not None or (backend.gpu is not None and backend.gpu.batch_invariant):
            self._linears = [PackedLinear(weight_OI.contiguous(), None, backend) for weight_OI in weight_HOI]
        else:
            self._weight_HIO = weight_HOI.to(backend.device, backend.compute_dtype).transpose(1, 2).contiguous()

    @property
    def num_bytes(self) -> int:
        if self._weight_HIO is not None:
            return self._weight_HIO.nbytes
        return sum(linear.num_bytes for linear in self._linears)

    def __call__(self, x_THI: torch.Tensor, out_THO: torch.Tensor) -> None:
        """Writes the result into out_THO. Both tensors may have any strides."""
        if self._weight_HIO is not None:
            x_HTI = x_THI.transpose(0, 1).to(self._weight_HIO.dtype)
            out_THO.copy_(torch.bmm(x_HTI, self._weight_HIO).transpose(0, 1))
            return
        for head, linear in enumerate(self._linears):
            out_THO[:, head] = linear(x_THI[:, head].contiguous())
