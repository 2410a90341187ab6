"""Parts of weights, for ranks that share a linear layer: outputs of the one kind of layer, inputs of the other.

Legend: O outputs, I inputs.
"""

import torch

from kernels.linear.fp8_weight import BLOCK, Fp8Weight
from kernels.linear.weights import GROUP, Int4Weight, Int8Weight, Weight


def slice_outputs(weight: Weight, part: slice) -> Weight:
    """[part, I]. Raises ValueError for e4m3 blocks that the part would cut."""
    match weight:
        case Int8Weight():
            return Int8Weight(values_OI=weight.values_OI[part], scales_OG=weight.scales_OG[part])
        case Int4Weight():
            return Int4Weight(
                values_OI=weight.values_OI[part], scales_OG=weight.scales_OG[part], minima_OG=weight.minima_OG[part]
            )
        case Fp8Weight():
            scales = weight.scales
            if weight.has_blocks:
                scales = scales[_groups(part, BLOCK, len(weight.values_OI), "outputs")]
            elif len(scales) > 1:
                scales = scales[part]
            return Fp8Weight(values_OI=weight.values_OI[part], scales=scales)
    # A copy, so that the whole is not kept.
    return weight[part].clone()


def slice_inputs(weight: Weight, part: slice) -> Weight:
    """[O, part], contiguous. Raises ValueError for groups or blocks that the part would cut."""
    if isinstance(weight, torch.Tensor):
        return weight[:, part].contiguous()
    num_inputs = weight.values_OI.shape[1]
    values_OI = weight.values_OI[:, part].contiguous()
    if isinstance(weight, Fp8Weight):
        scales = weight.scales
        if weight.has_blocks:
            scales = scales[:, _groups(part, BLOCK, num_inputs, "inputs")].contiguous()
        return Fp8Weight(values_OI=values_OI, scales=scales)
    groups = slice(None) if weight.scales_OG.shape[1] == 1 else _groups(part, GROUP, num_inputs, "inputs")
    scales_OG = weight.scales_OG[:, groups].contiguous()
    if isinstance(weight, Int8Weight):
        return Int8Weight(values_OI=values_OI, scales_OG=scales_OG)
    return Int4Weight(values_OI=values_OI, scales_OG=scales_OG, minima_OG=weight.minima_OG[:, groups].contiguous())


def _groups(part: slice, size: int, total: int, what: str) -> slice:
    if part.start % size or (part.stop % size and part.stop != total):
        raise ValueError(
            f"{what} {part.start} to {part.stop - 1} of {total} would cut groups of {size} that share a scale: use a "
            f"tensor_parallel_size whose parts are multiples of {size}"
        )
    return slice(part.start // size, -(-part.stop // size))
