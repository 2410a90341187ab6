"""Gated activations in PyTorch."""

from typing import Literal

import torch
import torch.nn.functional as F

# gelu in its tanh form (arXiv 1606.08415).
Activation = Literal["silu", "gelu_tanh"]


def silu_mul(gate_up: torch.Tensor, *, activation: Activation = "silu") -> torch.Tensor:
    """Returns [T, N] in the input's dtype from [T, 2N], whose first half is the gate; computed in float32. activation:
    the gate's."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    activated = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return activated.mul_(up).to(gate_up.dtype)
