"""4-bit weights as the GPU's GEMM reads them.

Legend: N outputs, K inputs, S spans of 64 inputs, G groups of 32 inputs, two for each span.
"""

from dataclasses import dataclass

import torch

# Inputs of a span: byte b of its 32 holds input b in its low half and input b + 32 in its high half.
SPAN = 64
GROUP = SPAN // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuInt4:
    """weight[n, k] = scales[g, n] * values[n, k] + minima[g, n], or, with has_zeros, scales[g, n] * (values[n, k] -
    minima[g, n]). Inputs that fill up the last span have scale 0 and minimum 0."""

    packed_NB: torch.Tensor  # uint8 [N, 32 S]
    # int64 [S, N]: float16 numbers from the lowest bits on: the first group's scale and minimum, then the second's.
    # GPUs copy 4 bytes and more to shared memory ahead of a loop; 2 bytes are loaded within it, and each turn waits.
    scales_SN: torch.Tensor
    has_zeros: bool
    num_inputs: int

    @property
    def num_bytes(self) -> int:
        return self.packed_NB.nbytes + self.scales_SN.nbytes


def packed_for_gpu(
    values_NK: torch.Tensor, scales_NG: torch.Tensor, minima_NG: torch.Tensor, *, has_zeros: bool
) -> GpuInt4:
    """Packs on the tensors' device. values_NK: uint8, 0 to 15. scales_NG, minima_NG: a number for each 32 inputs."""
    num_inputs = values_NK.shape[1]
    spans_NSHB = _filled(values_NK, SPAN).unflatten(1, (-1, 2, GROUP))
    scales_GN2 = torch.stack([_filled(each.half(), 2).t() for each in (scales_NG, minima_NG)], dim=2)
    scales_SN4 = scales_GN2.unflatten(0, (-1, 2)).transpose(1, 2).flatten(2).contiguous()
    return GpuInt4(
        packed_NB=(spans_NSHB[:, :, 0] | spans_NSHB[:, :, 1] << 4).flatten(1).contiguous(),
        scales_SN=scales_SN4.view(torch.int64)[..., 0],
        has_zeros=has_zeros,
        num_inputs=num_inputs,
    )


def _filled(numbers: torch.Tensor, multiple: int) -> torch.Tensor:
    return torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % multiple))
