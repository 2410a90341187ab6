"""y = x W^T + b with weights packed once for the machine at hand, and what goes with it fused: a norm of the input, a
gate, the addition to the residual stream."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernels.backend import Backend
from kernels.elementwise.silu_mul.torch_cpu import Activation
from kernels.linear.native import NativeLinear
from kernels.linear.residual import Residual
from kernels.linear.torch_cpu import OneDnnLinear
from kernels.linear.triton import GpuLinear
from kernels.linear.weights import Fp8Weight, PackedWeight, Weight, concatenate, dequantize

# The residual stream: on a GPU with what is not added yet.
Stream = torch.Tensor | Residual


class PackedLinear:
    """One linear layer. Weights are packed when it is made; the tensors given are not kept.

    Legend: T tokens, I inputs, O outputs.
    """

    __slots__ = ("_is_fp8", "_linear")

    def __init__(
        self,
        weight_OI: Weight | Sequence[Weight] | PackedWeight,
        bias_O: torch.Tensor | None,
        backend: Backend,
        *,
        norm_I: torch.Tensor | None = None,
        eps: float = 0.0,
        gated: bool = False,
        activation: Activation = "silu",
    ) -> None:
        """weight_OI: several are layers whose outputs lie side by side; one packed before is the `packed` of an equal
        layer. norm_I: weights of an RMS norm (with `eps`) that the input goes through first. gated: the first half of
        the outputs are gates of the other half, and the result, half as wide, is activation(gate) * other.
        """
        # Each takes the stream of its own device.
        self._linear: Any
        self._is_fp8 = False
        if backend.native is not None:
            self._linear = NativeLinear(
                weight_OI, bias_O, norm_I, eps, gated=gated, activation=activation, kernels=backend.native
            )
            return
        assert not isinstance(weight_OI, PackedWeight)
        whole_OI = concatenate(weight_OI) if isinstance(weight_OI, Sequence) else weight_OI
        if backend.gpu is None:
            self._linear = OneDnnLinear(
                dequantize(whole_OI),
                bias_O,
                norm_I,
                eps,
                gated=gated,
                activation=activation,
                dtype=backend.compute_dtype,
            )
        elif isinstance(whole_OI, Fp8Weight):
            # Triton takes half a second to import: not for workers on CPUs.
            from kernels.linear.triton_fp8 import GpuFp8Linear

            self._is_fp8 = True
            self._linear = GpuFp8Linear(
                whole_OI, bias_O, norm_I, eps, gated=gated, activation=activation, dtype=backend.compute_dtype,
                gpu=backend.gpu,
            )  # fmt: skip
        else:
            self._linear = GpuLinear(
                whole_OI, bias_O, norm_I, eps, gated=gated, activation=activation, dtype=backend.compute_dtype,
                gpu=backend.gpu,
            )  # fmt: skip

    @property
    def num_outputs(self) -> int:
        """O, the width of the result."""
        return self._linear.num_outputs

    @property
    def packed(self) -> PackedWeight | None:
        """For the constructor of an equal layer, to save it the packing; None: oneDNN keeps how it packs to itself."""
        return self._linear.packed

    @property
    def num_bytes(self) -> int:
        """That the packed weights take."""
        return self._linear.num_bytes

    def __call__(self, x_TI: Stream, out: torch.Tensor | None = None) -> torch.Tensor:
        """[T, O] of the backend's compute_dtype from contiguous x_TI (on a GPU T >= 1): of compute_dtype, or the
        residual stream (on a CPU float32) if there is a norm. Sums are float32. out: memory that the result may be
        put into, contiguous, of compute_dtype."""
        return self._linear(x_TI, out)

    def add_to_(self, y_TO: Stream, x_TI: torch.Tensor) -> None:
        """Adds the result to the residual stream, in place."""
        self._linear.add_to_(y_TO, x_TI)

    def add_through_(
        self, last: "PackedLinear", x: Stream, between: Callable[[], torch.Tensor], *, into: Stream
    ) -> None:
        """Adds last(self(x)) to a stream, in place; x is the residual stream, and may be the same. Of a gated layer
        with a norm. between: gives memory for self(x), if that is put anywhere: from FP8 to FP8 it is quantized as it
        comes."""
        if self._is_fp8 and last._is_fp8:
            last._linear.add_to_(into, self._linear.gated_for(last._linear, x))
        else:
            last.add_to_(into, self(x, out=between()))

    def argmax(
        self, x_TI: Stream, out: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids int64 [T], values float32 [T]) of each row's largest output, the lowest id among equals; of a row with
        NaN, that of the first. The same as of what a call returns, which is not kept. out: memory for both. Not for
        gated layers."""
        return self._linear.argmax(x_TI, out)


__all__ = ["PackedLinear", "PackedWeight", "Residual", "Stream"]
