"""Gated activations in PyTorch."""

from typing import Literal

import torch
import torch.nn.functional as F

# gelu in its tanh form (arXiv 1606.08415). clamped_swiglu is gpt-oss's (arXiv 2508.10925): (up + 1) * gate *
# sigmoid(1.702 * gate), with gate at most 7 and up within [-7, 7].
Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0


def silu_mul(gate_up: torch.Tensor, *, activation: Activation = "silu") -> torch.Tensor:
    """Returns [T, N] in the input's dtype from [T, 2N], whose first half is the gate; computed in float32. activation:
    the gate's."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        return (torch.sigmoid(SWIGLU_ALPHA * gate).mul_(gate) * (up + 1)).to(gate_up.dtype)
    activated = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return activated.mul_(up).to(gate_up.dtype)
