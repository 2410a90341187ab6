"""Rope in the order of Hugging Face checkpoints: the pairs are (i, i + D / 2)."""

import torch


def rope(
    heads_THD: torch.Tensor, positions_T: torch.Tensor, frequencies_P: torch.Tensor, magnitude: float
) -> torch.Tensor:
    """In float64."""
    angles_T1P = positions_T.double()[:, None, None] * frequencies_P.double()
    cos, sin = angles_T1P.cos() * magnitude, angles_T1P.sin() * magnitude
    first, second = heads_THD.double().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
