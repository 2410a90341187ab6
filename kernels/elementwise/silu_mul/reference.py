"""silu(gate) * up, gelu(gate) * up and gpt-oss's clamped SwiGLU, from their formulas."""

import math

import torch


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """In float64."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up


def clamped_swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """In float64."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """In float64; gelu in its tanh form (arXiv 1606.08415): 0.5 (1 + tanh(u)), written as 1 / (1 + exp(-2 u)), where
    small results don't cancel."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate / (1 + torch.exp(-2 * math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
