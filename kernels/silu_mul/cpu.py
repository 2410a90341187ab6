"""silu(gate) * up on a CPU."""

import torch
import torch.nn.functional as F


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, N] from [T, 2N], whose first half is the gate; computed in float32, returned in the dtype given."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return F.silu(gate).mul_(up).to(gate_up.dtype)
