"""Rope on a CPU, as one complex multiplication.

The pairs that rope rotates are adjacent here, (2i, 2i + 1), while checkpoints in Hugging Face's order have
(i, i + D / 2): `interleave_rope_pairs` reorders the q and k rows of the weights once. Attention gives the same result,
since q and k change alike.

Legend: T tokens, H heads, D head size, P = D / 2 pairs.
"""

import torch


def interleave_rope_pairs(rows: torch.Tensor, head_size: int, rope_size: int | None = None) -> torch.Tensor:
    """Reorders dim 0, of size heads * head_size, from pairs (i, i + R / 2) to pairs (2i, 2i + 1) within the first R
    numbers of each head. rope_size: R; None: D."""
    if rope_size is not None and rope_size < head_size:
        heads = rows.unflatten(0, (-1, head_size))
        rotated = interleave_rope_pairs(heads[:, :rope_size].flatten(0, 1), rope_size)
        return torch.cat((rotated.unflatten(0, (-1, rope_size)), heads[:, rope_size:]), dim=1).flatten(0, 1)
    return rows.unflatten(0, (-1, 2, head_size // 2)).transpose(1, 2).flatten(0, 2)


def cos_sin_table(positions_T: torch.Tensor, frequencies_P: torch.Tensor, magnitude: float) -> torch.Tensor:
    """complex64 [T, 1, P]: cosine and sine of each pair's angle at each position, times magnitude, for `apply_rope_`.
    positions: integers. frequencies: float32, radians a token."""
    angles_T1P = positions_T.float()[:, None, None] * frequencies_P
    return torch.polar(torch.tensor(magnitude).expand_as(angles_T1P), angles_T1P)


def apply_rope_(heads_THD: torch.Tensor, cos_sin_T1P: torch.Tensor) -> None:
    """Rotates the pairs (2i, 2i + 1) of every head in place, computing in float32.

    heads_THD: float32 or bfloat16, contiguous in its last dim. 20 us for 64 tokens of 12 heads, against 54 for the
    usual two products and a concatenation (AVX2, 2 threads).
    """
    float_THD = heads_THD.float()
    _as_pairs(float_THD).mul_(cos_sin_T1P)
    if float_THD is not heads_THD:
        heads_THD.copy_(float_THD)


def rotate_pairs_(heads_THD: torch.Tensor, cos_sin_T1P: torch.Tensor) -> None:
    """Like `apply_rope_`, but each product and sum is rounded separately, so that a token's bits do not depend on its
    place in the tensor; with torch's complex multiplication they do. heads_THD: float32, any strides."""
    first, second = heads_THD[..., ::2].clone(), heads_THD[..., 1::2].clone()
    cos, sin = cos_sin_T1P.real, cos_sin_T1P.imag
    torch.sub(first * cos, second * sin, out=heads_THD[..., ::2])
    torch.add(second * cos, first * sin, out=heads_THD[..., 1::2])


def _as_pairs(heads_THD: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(heads_THD.unflatten(-1, (-1, 2)))
