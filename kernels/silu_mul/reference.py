"""silu(gate) * up, written out."""

import torch


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """In float64."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up
