"""A mixture of experts as a loop over pairs, in float64."""

import torch
import torch.nn.functional as F


def run_experts_reference(
    x_TH: torch.Tensor,
    gate_up_E2IH: torch.Tensor,
    down_EHI: torch.Tensor,
    weights_TK: torch.Tensor,
    experts_TK: torch.Tensor,
) -> torch.Tensor:
    """`kernels.moe.gemm.triton.run_experts`, with weights as numbers and nothing rounded: float64 [T, H]."""
    out_TH = torch.zeros(x_TH.shape, dtype=torch.float64)
    for token, (weights, experts) in enumerate(zip(weights_TK.tolist(), experts_TK.tolist(), strict=True)):
        for weight, expert in zip(weights, experts, strict=True):
            if expert < 0:
                continue
            gate_I, up_I = (gate_up_E2IH[expert].double() @ x_TH[token].double()).chunk(2)
            out_TH[token] += weight * (down_EHI[expert].double() @ (F.silu(gate_I) * up_I))
    return out_TH
