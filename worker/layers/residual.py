"""The residual stream, what layers read of it, and what they add to it.

The `forward` of a block is its formula, such as `x = x + attention(norm(x))`. Its terms are small values that say what
is to be computed. `norm(x)` is a `Normed`: the first linear layer that reads it computes the norm. A layer's result is
a `LayerOutput`, whose last linear layer is computed by `+`, which adds it in the stream's memory. So kernels fuse the
norm, the projections and the sum, and the formula makes the same kernel calls whether a step runs, is recorded (CPUs)
or is captured in a graph (GPUs).

Legend: T tokens, E hidden size.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.backend import Backend
from kernels.elementwise.rms_norm import add_rms_norm_
from kernels.linear import Residual, Stream
from worker.layers.forward_context import WantedRows, current
from worker.weights.reader import Shape, WeightReader


class ResidualStream:
    """The stream of a step at one place of the model. A sum takes over its memory, so only the latest can be read."""

    __slots__ = ("_values", "wanted")

    def __init__(self, values: Stream, wanted: WantedRows | None = None) -> None:
        """values: float32 [T, E]; on a GPU, with what is still to be added. wanted: the next layer computes the result
        of these tokens alone, and the sum with it has no others."""
        self._values: Stream | None = values
        self.wanted = wanted

    @property
    def values(self) -> Stream:
        assert self._values is not None, "something was added to this stream: read the sum"
        return self._values

    def __len__(self) -> int:
        return len(self.values)

    def __add__(self, output: "LayerOutput") -> "ResidualStream":
        """Computes the output, summed over the ranks, and adds it in place."""
        assert output.wanted is self.wanted, "the layer computes all tokens"
        values = self.values
        if output.wanted is not None:
            assert isinstance(values, torch.Tensor)
            values = output.wanted.of("wanted stream", values, current().workspace.take)
        if output.is_summed:
            output.add_to_(values)
        else:
            add_sum_of_ranks_(values, output.add_to_, output.norm)
        self._values = None
        return ResidualStream(values)


@dataclass(frozen=True, slots=True)
class InputNorm:
    """The RMS norm of what a layer reads. name: of its tensor, such as model.layers.3.input_layernorm; the layer loads
    it, because its first linear layer computes the norm."""

    name: str
    eps: float

    def __call__(self, x: ResidualStream) -> "Normed":
        return Normed(x, self)


# Not frozen, as LayerOutput below: two of each are made a block in steps that Python computes, and frozen ones made a
# block's formula take 13 us instead of 6 (layers that compute nothing, a busy CPU).
@dataclass(slots=True)
class Normed:
    """norm(x), not computed yet."""

    x: ResidualStream
    norm: InputNorm

    def __len__(self) -> int:
        return len(self.x)

    @property
    def wanted(self) -> WantedRows | None:
        return self.x.wanted


# A tensor, float32 [T, any], is read as it is; so is the stream.
LayerInput = Normed | ResidualStream | torch.Tensor


def stream_for(h: LayerInput, norm: InputNorm | None) -> Stream:
    """Returns the input of a linear layer that computes `norm` first, or none."""
    if isinstance(h, Normed):
        assert h.norm is norm, "the layer was loaded with another norm"
        return h.x.values
    assert norm is None, "the layer computes a norm first"
    return h if isinstance(h, torch.Tensor) else unnormed(h.values)


@dataclass(slots=True)
class LayerOutput:
    """The sum that a layer contributes: this rank's part of it, computed when it is added.

    add_to_: adds the part to a stream, in place. norm: of the sum over the ranks. wanted: see ResidualStream.
    is_summed: add_to_ itself adds the sum over the ranks; it is called for steps without tokens, too.
    """

    add_to_: Callable[[Stream], None]
    norm: "OutputNorm | None" = None
    wanted: WantedRows | None = None
    is_summed: bool = False


def nothing(wanted: WantedRows | None = None) -> LayerOutput:
    """Returns the output of a layer that has no tokens to compute."""
    return LayerOutput(lambda x_TE: None, wanted=wanted)


class Layer(ABC):
    """A part of a block: attention, an MLP, a mixture of experts, a layer with a state."""

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes of its weights in memory."""

    @abstractmethod
    def __call__(self, h: LayerInput, /) -> LayerOutput:
        """Called within a ForwardContext; the output is to be added before anything else is computed."""


class OutputNorm:
    """The RMS norm of what a layer adds. name: its tensor, such as model.layers.3.post_attention_layernorm."""

    def __init__(self, name: str, eps: float, reader: WeightReader, backend: Backend) -> None:
        self._weight_E = reader(f"{name}.weight").float().contiguous().to(backend.device)
        self._eps, self._kernels = eps, backend.native

    def __call__(self, output: LayerOutput) -> LayerOutput:
        assert not output.is_summed
        return LayerOutput(output.add_to_, self, output.wanted)

    def clear_(self, part_TE: torch.Tensor) -> None:
        """On a CPU: fills part_TE with zeros; a replay of the step does so, too."""
        if self._kernels is None:
            part_TE.zero_()
        else:
            self._kernels.zero(part_TE.data_ptr(), *part_TE.shape)

    def add_to_(self, x_TE: torch.Tensor, part_TE: torch.Tensor) -> None:
        """On a CPU: adds the norm of a part to the stream, both float32."""
        add_rms_norm_(x_TE, part_TE, self._weight_E, self._eps, self._kernels)

    def norm_(self, delta_TE: torch.Tensor) -> None:
        """On a GPU: norms the stream's pending delta, in place."""
        from kernels.elementwise.rms_norm.triton import rms_norm  # imports Triton

        rms_norm(delta_TE, self._weight_E, self._eps, out=delta_TE)


def norm_shapes(prefix: str, size: int, *names: str) -> dict[str, Shape]:
    """Returns the shapes of norms' tensors under a prefix, by name."""
    return {f"{prefix}.{name}.weight": (size,) for name in names}


def unnormed(x_TE: Stream) -> torch.Tensor:
    """Returns the residual stream as input of a linear layer without a norm. On a GPU, the pending delta is added to
    the stream first, and the result has the delta's dtype."""
    if not isinstance(x_TE, Residual):
        return x_TE
    if x_TE.is_pending:
        x_TE.x_TE += x_TE.delta_TE
        x_TE.is_pending = False
    return x_TE.x_TE.to(x_TE.delta_TE.dtype)


def add_sum_of_ranks_(x_TE: Stream, add_to_: Callable[[Stream], None], norm: OutputNorm | None = None) -> None:
    """Calls add_to_ on each rank, sums what the calls add over all ranks, norms the sum if there is a norm, and adds it
    to the residual stream, in place."""
    context = current()
    if not len(x_TE):
        return
    if context.group.size == 1 and norm is None:
        add_to_(x_TE)
    elif isinstance(x_TE, Residual):
        add_to_(x_TE)
        context.group.sum_(x_TE.delta_TE)
        if norm is not None:
            norm.norm_(x_TE.delta_TE)
    elif norm is None:
        part_TE = context.workspace.take("part", *x_TE.shape, dtype=torch.float32).zero_()
        add_to_(part_TE)
        context.group.sum_(part_TE)
        x_TE += part_TE
    else:
        part_TE = context.workspace.take("part", *x_TE.shape, dtype=torch.float32)
        norm.clear_(part_TE)
        add_to_(part_TE)
        context.group.sum_(part_TE)
        norm.add_to_(x_TE, part_TE)
