"""The linear layer in plain PyTorch."""

import torch

from kernels.linear.weights import GROUP, Int4Weight, Int8Weight


def linear(x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    """In float64."""
    y_TO = x_TI.double() @ weight_OI.double().T
    return y_TO if bias_O is None else y_TO + bias_O.double()


def quantized_linear(
    x_TI: torch.Tensor, weight_OI: Int8Weight | Int4Weight, bias_O: torch.Tensor | None
) -> torch.Tensor:
    """Computes on integers, like the C++ kernels; sums of scaled products are float64.

    Inputs are rounded, too: for each 32 of a row, a = max |x| / 127 in float32, and q = round(x * (127 / max |x|)),
    ties to even. Then y = sum over groups g of
        s[g] a[g] dot(w[g], q[g]), and in 4 bits  + m[g] a[g] sum(q[g])
    with w, s and m the weights' values, scales and minima (with zeros z, m is -s z); a scale for whole rows is applied
    last. If an input of a group is infinite or NaN, a is NaN; if all are below 2^-100, a is 0.
    """
    values_TGI, scales_TG = quantized_inputs(x_TI)
    weights_OGI = _in_groups(weight_OI.values_OI.double())
    dots_TOG = torch.einsum("tgi,ogi->tog", values_TGI.double(), weights_OGI)
    a_T1G = scales_TG.double().unsqueeze(1)
    y_TO = (dots_TOG * weight_OI.scales_OG.double() * a_T1G).sum(2)
    if isinstance(weight_OI, Int4Weight):
        offsets_T1G = a_T1G * values_TGI.double().sum(2).unsqueeze(1)
        minima_OG = weight_OI.minima_OG.double()
        if weight_OI.has_zeros:
            minima_OG = -minima_OG * weight_OI.scales_OG.double()
        y_TO += (minima_OG * offsets_T1G).sum(2)
    return y_TO if bias_O is None else y_TO + bias_O.double()


def quantized_inputs(x_TI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (values int8 [T, G, 32], scales float32 [T, G]) of float32 inputs; zeros fill a short last group."""
    groups_TGI = _in_groups(x_TI.float())
    largest_TG = groups_TGI.abs().amax(dim=2)
    scales_TG = torch.where(largest_TG >= 2.0**-100, largest_TG / 127, 0.0)
    scales_TG = torch.where(largest_TG.isfinite(), scales_TG, torch.nan)
    inverse_TG = torch.where(scales_TG > 0, 127 / largest_TG, 0.0)
    values_TGI = (groups_TGI * inverse_TG.unsqueeze(2)).nan_to_num(0.0).round()
    return values_TGI.to(torch.int8), scales_TG


def _in_groups(rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(rows, (0, -rows.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
