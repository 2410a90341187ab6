"""Linear layers by oneDNN with prepacked weights; norm and gate around them in PyTorch."""

import torch

from kernels.elementwise.rms_norm import rms_norm
from kernels.elementwise.silu_mul import Activation, silu_mul
from kernels.sampling import TokenMasks, apply_masks, greedy

# oneDNN packs weights for a number of rows. Packed for 64, M = 1 to 64 run as fast as packed for each M (within 5%);
# packed for 1, M = 8 loses 40 to 60% (AVX2, 576x3072, 2 threads).
PACKED_FOR_ROWS = 64


def soft_capped(y: torch.Tensor, cap: float) -> torch.Tensor:
    """Returns cap * tanh(y / cap), computed in float32."""
    return (
        y.float().div_(cap).tanh_().mul_(cap).to(y.dtype) if y.dtype is not torch.float32 else cap * torch.tanh(y / cap)
    )


class OneDnnLinear:
    """PackedLinear on a CPU without C++ kernels."""

    __slots__ = ("_activation", "_bias_O", "_dtype", "_eps", "_gated", "_norm_I", "_soft_cap", "_weight", "num_outputs")

    def __init__(
        self,
        weight_OI: torch.Tensor,
        bias_O: torch.Tensor | None,
        norm_I: torch.Tensor | None,
        eps: float,
        *,
        gated: bool,
        activation: Activation = "silu",
        soft_cap: float = 0.0,
        dtype: torch.dtype,
    ) -> None:
        self.num_outputs = len(weight_OI) // 2 if gated else len(weight_OI)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight_OI.to(dtype).contiguous(), PACKED_FOR_ROWS)
        self._bias_O = None if bias_O is None else bias_O.to(dtype)
        self._norm_I, self._eps = norm_I, eps
        self._gated, self._dtype = gated, dtype
        self._activation: Activation = activation
        self._soft_cap = soft_cap

    @property
    def packed(self) -> None:
        return None

    @property
    def num_bytes(self) -> int:
        return self._weight.nbytes

    def __call__(self, x_TI: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """See PackedLinear. The result is always in new memory, never in `out`."""
        x_TI = x_TI.to(self._dtype) if self._norm_I is None else rms_norm(x_TI, self._norm_I, self._eps, self._dtype)
        y_TO = torch.ops.mkldnn._linear_pointwise(x_TI, self._weight, self._bias_O, "none", [], "")
        if self._soft_cap:
            y_TO = soft_capped(y_TO, self._soft_cap)
        return silu_mul(y_TO, activation=self._activation) if self._gated else y_TO

    def add_to_(self, y_TO: torch.Tensor, x_TI: torch.Tensor) -> None:
        y_TO += self(x_TI)

    def argmax(
        self, x_TI: torch.Tensor, out: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids_T, values_T = map(torch.from_numpy, greedy(self(x_TI).float().numpy()))
        return (ids_T, values_T) if out is None else (out[0].copy_(ids_T), out[1].copy_(values_T))

    def masked_argmax(self, x_TI: torch.Tensor, masks: TokenMasks) -> tuple[torch.Tensor, torch.Tensor]:
        logits_TO = self(x_TI).float().numpy()
        apply_masks(logits_TO, masks)
        ids_T, values_T = greedy(logits_TO)
        return torch.from_numpy(ids_T), torch.from_numpy(values_T)
