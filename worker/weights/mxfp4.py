"""MXFP4 (OCP Microscaling Formats 1.0): blocks of 32 numbers of 4 bits, which share a power of two.

Legend: G blocks of a row, C = 32 G numbers of a row.
"""

import torch

# The numbers that 4 bits stand for, E2M1: a sign, two bits of exponent, one of mantissa.
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCK = 32
# The exponents, E8M0, are stored with this bias; 255 stands for NaN.
_BIAS, _NAN = 127, 255


def dequantize_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns [..., C] in `dtype`; exact in bfloat16 and float32.

    blocks: uint8 [..., G, 16]; a byte holds two numbers, the first in its low bits. scales: uint8 [..., G]. Raises
    ValueError for other shapes and dtypes, and for a scale that is NaN.
    """
    if blocks.dtype is not torch.uint8 or scales.dtype is not torch.uint8:
        raise ValueError(f"blocks of {blocks.dtype} and scales of {scales.dtype}; uint8 is expected for both")
    if blocks.shape != (*scales.shape, BLOCK // 2):
        raise ValueError(
            f"blocks of shape {list(blocks.shape)} and scales of shape {list(scales.shape)}: "
            f"{[*scales.shape, BLOCK // 2]} and that without the last are expected"
        )
    if (scales == _NAN).any():
        raise ValueError("a scale is NaN (255); scales must be finite")
    table = torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=torch.float32)
    numbers = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    exponents = (scales.to(torch.int32) - _BIAS)[..., None]
    return torch.ldexp(table[numbers.int()], exponents).flatten(-2).to(dtype)
