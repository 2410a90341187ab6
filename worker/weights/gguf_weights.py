"""Reads linear weights of a GGUF file as the integers stored in it. Formats: ggml-org/ggml, src/ggml-common.h.

Legend: O outputs, I inputs, G blocks of 32 inputs.
"""

import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

from kernels.linear.weights import GROUP, Int4Weight, Int8Weight

INTEGER_KINDS = (Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.IQ4_NL)

_HALF = np.dtype("<f2")
# The numbers of IQ4_NL's codes.
_IQ4_NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)


def integer_weight(kind: Kind, rows_OB: np.ndarray, num_inputs: int) -> Int8Weight | Int4Weight | None:
    """Makes a weight from the bytes of each row: blocks of a scale (Q4_1: and a minimum), then 32 values, all kept as
    they are. Q5_0's values and the numbers of IQ4_NL's codes are kept in 8 bits.

    Q4_0's values count from -8, so its minima are -8 * scale. Returns None if one of these is beyond float16.
    """
    blocks_OGB = rows_OB.reshape(len(rows_OB), num_inputs // GROUP, -1)
    scales_OG = blocks_OGB[:, :, :2].copy().view(_HALF)[:, :, 0]
    if kind is Kind.Q8_0:
        values_OI = np.array(blocks_OGB[:, :, 2:]).view(np.int8).reshape(len(rows_OB), num_inputs)
        return Int8Weight(values_OI=torch.from_numpy(values_OI), scales_OG=_tensor(scales_OG))
    # A byte holds the low 4 bits of inputs i and i + 16.
    bytes_OGB = blocks_OGB[:, :, -GROUP // 2 :]
    values_OGI = np.concatenate((bytes_OGB & 0x0F, bytes_OGB >> 4), axis=2)
    if kind in (Kind.Q5_0, Kind.IQ4_NL):
        if kind is Kind.IQ4_NL:
            signed_OGI = _IQ4_NL[values_OGI]
        else:
            fifth_OGI = np.unpackbits(np.ascontiguousarray(blocks_OGB[:, :, 2:6]), axis=2, bitorder="little")
            signed_OGI = (values_OGI | fifth_OGI << 4).astype(np.int8) - np.int8(16)
        values_OI = torch.from_numpy(signed_OGI.reshape(len(rows_OB), num_inputs))
        return Int8Weight(values_OI=values_OI, scales_OG=_tensor(scales_OG))
    if kind is Kind.Q4_0:
        # Multiplication by a power of two is exact unless it overflows.
        with np.errstate(over="ignore"):
            minima_OG = scales_OG * _HALF.type(-8)
        if not np.isfinite(minima_OG).all():
            return None
    else:
        minima_OG = blocks_OGB[:, :, 2:4].copy().view(_HALF)[:, :, 0]
    return Int4Weight(
        values_OI=torch.from_numpy(values_OGI.reshape(len(rows_OB), num_inputs)),
        scales_OG=_tensor(scales_OG),
        minima_OG=_tensor(minima_OG),
    )


def _tensor(halves: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(halves, np.float16))
