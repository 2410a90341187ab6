"""y = x W^T + b with weights packed once for this machine, fused with what surrounds it: a norm of the input, a gate,
the addition to the residual stream."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernels.backend import Backend
from kernels.elementwise.silu_mul.torch_cpu import Activation
from kernels.linear.native import NativeLinear
from kernels.linear.residual import Residual
from kernels.linear.torch_cpu import OneDnnLinear
from kernels.linear.triton import GpuLinear
from kernels.linear.weights import Fp8Weight, Int4Weight, PackedWeight, Weight, concatenate, dequantize
from kernels.sampling import TokenMasks

# The residual stream; on a GPU it carries what is not added yet.
Stream = torch.Tensor | Residual


class PackedLinear:
    """One linear layer. The constructor packs the weights, and keeps none of the tensors given.

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
        soft_cap: float = 0.0,
    ) -> None:
        """weight_OI: a sequence stands for layers whose outputs are concatenated; a PackedWeight is the `packed` of an
        equal layer. norm_I: weights of an RMS norm (with `eps`) of the input. gated: the first half of the outputs are
        gates of the other half, and the result, half as wide, is activation(gate) * other, or another function of both
        (kernels.elementwise.silu_mul). soft_cap: outputs y become soft_cap * tanh(y / soft_cap); 0: no cap. For output
        heads.
        """
        # One class per device; each takes its device's kind of stream.
        self._linear: Any
        self._is_fp8 = False
        if backend.native is not None:
            self._linear = NativeLinear(
                weight_OI,
                bias_O,
                norm_I,
                eps,
                gated=gated,
                activation=activation,
                soft_cap=soft_cap,
                kernels=backend.native,
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
                soft_cap=soft_cap,
                dtype=backend.compute_dtype,
            )
        elif isinstance(whole_OI, Fp8Weight):
            # Imported here, since importing Triton takes half a second, which workers on CPUs need not spend.
            from kernels.linear.triton_fp8 import GpuFp8Linear

            assert not soft_cap, "output heads are never e4m3"
            self._is_fp8 = True
            self._linear = GpuFp8Linear(
                whole_OI,
                bias_O,
                norm_I,
                eps,
                gated=gated,
                activation=activation,
                dtype=backend.compute_dtype,
                gpu=backend.gpu,
            )
        elif isinstance(whole_OI, Int4Weight):
            from kernels.linear.triton_int4 import GpuInt4Linear

            self._linear = GpuInt4Linear(
                whole_OI,
                bias_O,
                norm_I,
                eps,
                gated=gated,
                activation=activation,
                dtype=backend.compute_dtype,
                gpu=backend.gpu,
            )
        else:
            self._linear = GpuLinear(
                whole_OI,
                bias_O,
                norm_I,
                eps,
                gated=gated,
                activation=activation,
                soft_cap=soft_cap,
                dtype=backend.compute_dtype,
                gpu=backend.gpu,
            )

    @property
    def num_outputs(self) -> int:
        """The width of the result, O."""
        return self._linear.num_outputs

    @property
    def packed(self) -> PackedWeight | None:
        """The packed weights, for the constructor of an equal layer. None if they cannot be shared (oneDNN, GPUs)."""
        return self._linear.packed

    @property
    def num_bytes(self) -> int:
        """Bytes that the packed weights take."""
        return self._linear.num_bytes

    def __call__(self, x_TI: Stream, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns [T, O] in the backend's compute_dtype. x_TI is contiguous, in compute_dtype, or, if there is a norm,
        the residual stream (float32 on a CPU); on a GPU T >= 1. Sums are float32. out: contiguous memory in
        compute_dtype that may receive the result."""
        return self._linear(x_TI, out)

    def add_to_(self, y_TO: Stream, x_TI: torch.Tensor) -> None:
        """Adds the result to the residual stream, in place."""
        self._linear.add_to_(y_TO, x_TI)

    def add_through_(
        self, last: "PackedLinear", x: Stream, between: Callable[[], torch.Tensor], *, into: Stream
    ) -> None:
        """Adds last(self(x)) to the stream `into`, in place. For a gated layer with a norm. x: the residual stream,
        which may be `into` itself. between: returns memory for self(x), whatever is left in it; not called between FP8
        layers, where self(x) is quantized at once."""
        if self._is_fp8 and last._is_fp8:
            last._linear.add_to_(into, self._linear.gated_for(last._linear, x))
        elif isinstance(self._linear, NativeLinear):
            assert isinstance(x, torch.Tensor)
            assert isinstance(into, torch.Tensor)
            self._linear.add_through_(last._linear, x, between(), into)
        else:
            last.add_to_(into, self(x, out=between()))

    def argmax(
        self, x_TI: Stream, out: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (ids int64 [T], values float32 [T]) of each row's largest output: among equals the lowest id, in a
        row with NaN the first NaN. The same as the argmax of a call's result, which is not stored. out: memory for
        both. Not for gated layers."""
        return self._linear.argmax(x_TI, out)

    def masked_argmax(self, x_TI: Stream, masks: TokenMasks) -> tuple[torch.Tensor, torch.Tensor]:
        """Like argmax, of the outputs that masks leave, one for each row (CPUs only). The value is not finite if any
        output of the row is NaN or infinite, masked or not, or if the mask leaves none: then it is -inf."""
        return self._linear.masked_argmax(x_TI, masks)


__all__ = ["PackedLinear", "PackedWeight", "Residual", "Stream"]
