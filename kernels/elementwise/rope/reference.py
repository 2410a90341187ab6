"""Rope, on pairs (i, i + P), the order of Hugging Face checkpoints, or on pairs (2i, 2i + 1)."""

import torch


def rope(
    heads_THD: torch.Tensor,
    positions_T: torch.Tensor,
    frequencies_P: torch.Tensor,
    magnitude: float,
    *,
    interleaved: bool = False,
) -> torch.Tensor:
    """In float64; a head's numbers after the first 2 P stay as they are."""
    angles_T1P = positions_T.double()[:, None, None] * frequencies_P.double()
    cos, sin = angles_T1P.cos() * magnitude, angles_T1P.sin() * magnitude
    num_turned = 2 * len(frequencies_P)
    turned_THR, rest = heads_THD.double()[..., :num_turned], heads_THD.double()[..., num_turned:]
    if interleaved:
        first, second = turned_THR[..., ::2], turned_THR[..., 1::2]
    else:
        first, second = turned_THR.chunk(2, dim=-1)
    pairs = (first * cos - second * sin, second * cos + first * sin)
    turned_THR = torch.stack(pairs, dim=-1).flatten(-2) if interleaved else torch.cat(pairs, dim=-1)
    return torch.cat((turned_THR, rest), dim=-1)
