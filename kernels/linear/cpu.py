"""Linear layers on a CPU, through oneDNN with prepacked weights.

Legend: T tokens, I inputs, O outputs.
"""

from enum import Enum

import torch

# oneDNN lays weights out for a number of rows. Packed for 64, M = 1 to 64 are as fast as packed for each (within 5%);
# packed for 1, M = 8 loses 40 to 60% (AVX2, 576x3072, 2 threads).
PACKED_FOR_ROWS = 64


class GemmPath(Enum):
    """How a model's dtype is multiplied on this machine; the value goes into a replica's numerics fingerprint."""

    FLOAT32 = "cpu-onednn-float32"
    BFLOAT16 = "cpu-onednn-bfloat16"
    # Without bf16 instructions a bf16 GEMM is emulated, at a tenth of float32's speed (M = 64, 576x3072: 11.5 ms
    # against 1.4). Weights rounded to bf16 are therefore held, and multiplied, as float32.
    BFLOAT16_AS_FLOAT32 = "cpu-onednn-bfloat16-as-float32"

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of the activations that go into a linear and come out of it."""
        return torch.bfloat16 if self is GemmPath.BFLOAT16 else torch.float32


def gemm_path(dtype: torch.dtype) -> GemmPath:
    """The path for a model of `dtype` (float32 or bfloat16) on this CPU."""
    if dtype is torch.float32:
        return GemmPath.FLOAT32
    # torch's own bf16 check is content with AVX512BW, where oneDNN emulates.
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return GemmPath.BFLOAT16 if native else GemmPath.BFLOAT16_AS_FLOAT32


class PackedLinear:
    """One linear layer. Weights are packed when it is made; the tensors given are not kept."""

    __slots__ = ("_bias_O", "_weight", "compute_dtype", "num_outputs")

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, path: GemmPath) -> None:
        self.compute_dtype = path.compute_dtype
        self.num_outputs = weight_OI.shape[0]
        weight_OI = weight_OI.to(self.compute_dtype).contiguous()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight_OI, PACKED_FOR_ROWS)
        self._bias_O = None if bias_O is None else bias_O.to(self.compute_dtype)

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        """[T, O] of compute_dtype, from x_TI of compute_dtype, T >= 1; sums are float32."""
        return torch.ops.mkldnn._linear_pointwise(x_TI, self._weight, self._bias_O, "none", [], "")
