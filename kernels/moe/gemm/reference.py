"""A mixture of experts as a loop over pairs, in float64."""

from collections.abc import Callable

import torch

from kernels.elementwise.silu_mul.reference import silu_mul


def run_experts_reference(
    x_TH: torch.Tensor,
    gate_up_E2IH: torch.Tensor,
    down_EHI: torch.Tensor,
    weights_TK: torch.Tensor,
    experts_TK: torch.Tensor,
    gate_up_bias_E2I: torch.Tensor | None = None,
    down_bias_EH: torch.Tensor | None = None,
    activated: Callable[[torch.Tensor], torch.Tensor] = silu_mul,
) -> torch.Tensor:
    """`kernels.moe.gemm.triton.run_experts`, with weights as numbers and nothing rounded: float64 [T, H]. activated:
    one of kernels.elementwise.silu_mul.reference."""
    out_TH = torch.zeros(x_TH.shape, dtype=torch.float64)
    for token, (weights, experts) in enumerate(zip(weights_TK.tolist(), experts_TK.tolist(), strict=True)):
        for weight, expert in zip(weights, experts, strict=True):
            if expert < 0:
                continue
            gate_up_2I = gate_up_E2IH[expert].double() @ x_TH[token].double()
            if gate_up_bias_E2I is not None:
                gate_up_2I += gate_up_bias_E2I[expert].double()
            down_H = down_EHI[expert].double() @ activated(gate_up_2I)
            if down_bias_EH is not None:
                down_H += down_bias_EH[expert].double()
            out_TH[token] += weight * down_H
    return out_TH
