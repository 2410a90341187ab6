"""FP8 quantization as formulas: q = e4m3(x / s), s = max |x| / 448 over all numbers that share a scale.

Legend: M rows, K columns, G = ceil(K / 128).
"""

import torch

E4M3_MAX = 448.0
MIN_AMAX = 1e-10
GROUP = 128


def scale_of(amax: torch.Tensor, *, power_of_two: bool = False) -> torch.Tensor:
    """float32 scales of groups from their largest |x|; NaN where that is not finite (amax must propagate NaN)."""
    amax = amax.float().clamp_min(MIN_AMAX)
    # By a tensor: on a GPU, torch multiplies by the rounded reciprocal of a number.
    scale = amax / torch.full_like(amax, E4M3_MAX)
    if power_of_two:
        mantissa, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
    return torch.where(amax.isfinite(), scale, torch.nan)


def to_e4m3(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """e4m3 of x / scale (by its reciprocal, in float32), saturated; NaN where x is not finite or scale is NaN."""
    scaled = (x.float() * (1 / scale)).clamp(-E4M3_MAX, E4M3_MAX)
    return torch.where(x.isfinite(), scaled, torch.nan).to(torch.float8_e4m3fn)


def quantize_tensor(
    x: torch.Tensor, scale: torch.Tensor | None = None, *, power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    if scale is None:
        scale = scale_of(x.float().abs().amax().reshape(1), power_of_two=power_of_two)
    return to_e4m3(x, scale), scale


def quantize_tokens(x_MK: torch.Tensor, *, power_of_two: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    scales_M1 = scale_of(x_MK.float().abs().amax(-1, keepdim=True), power_of_two=power_of_two)
    return to_e4m3(x_MK, scales_M1), scales_M1


def quantize_groups(x_MK: torch.Tensor, *, power_of_two: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    return _quantize_blocks(x_MK, 1, power_of_two)


def quantize_blocks(weight_NK: torch.Tensor, *, power_of_two: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    return _quantize_blocks(weight_NK, GROUP, power_of_two)


def spread(scales: torch.Tensor, block: tuple[int, int], shape: tuple[int, int]) -> torch.Tensor:
    """The scale of each number of a matrix of `shape` that has one scale per block of rows x columns."""
    return scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]


def _quantize_blocks(x_MK: torch.Tensor, rows: int, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor]:
    M, K = x_MK.shape
    padded = torch.nn.functional.pad(x_MK.float().abs(), (0, -K % GROUP, 0, -M % rows))
    amax = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // GROUP, GROUP).amax((1, 3))
    scales = scale_of(amax, power_of_two=power_of_two)
    return to_e4m3(x_MK, spread(scales, (rows, GROUP), (M, K))), scales
