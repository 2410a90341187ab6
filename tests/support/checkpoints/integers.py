"""Writes weights as AWQ, GPTQ and compressed-tensors store integers in groups, and reads them back by the formulas that
the libraries publish.

Legend: O outputs, I inputs, G groups of inputs.
"""

import numpy as np
import torch

Tensors = dict[str, torch.Tensor]
# AutoAWQ: the output in each place of a word, the lowest bits first.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def rounded(
    weight_OI: torch.Tensor, bits: int, groups_I: torch.Tensor, *, symmetric: bool, dtype: torch.dtype = torch.float16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rounds to the nearest integer. Returns integers [O, I] from 0 on, scales [O, G] in dtype, and zeros [O, G]."""
    num_groups, largest = int(groups_I.max()) + 1, 2**bits - 1
    groups = [weight_OI[:, groups_I == group].float() for group in range(num_groups)]
    if symmetric:
        scales_OG = torch.stack([group.abs().amax(1) * 2 / largest for group in groups], 1).to(dtype)
        zeros_OG = torch.full(scales_OG.shape, 2 ** (bits - 1))
    else:
        low_OG = torch.stack([group.amin(1).clamp(max=0) for group in groups], 1)
        high_OG = torch.stack([group.amax(1).clamp(min=0) for group in groups], 1)
        scales_OG = ((high_OG - low_OG) / largest).to(dtype)
        zeros_OG = (-low_OG / scales_OG.float()).round().clamp(0, largest).long()
    spread = scales_OG.float()[:, groups_I]
    integers_OI = ((weight_OI.float() / spread).round() + zeros_OG[:, groups_I]).clamp(0, largest).long()
    return integers_OI, scales_OG, zeros_OG


def adjacent(num_inputs: int, group_size: int) -> torch.Tensor:
    """The group of each input, if groups are adjacent. group_size: -1: one group."""
    return torch.arange(num_inputs) // (num_inputs if group_size == -1 else group_size)


def packed(integers: torch.Tensor, bits: int, dim: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """int32 words along dim. order: the index, within a word, of the integer in each place."""
    per_word = 32 // bits
    matrix = integers.numpy().astype(np.uint64)
    matrix = matrix.T if dim == 0 else matrix
    matrix = np.pad(matrix, ((0, 0), (0, -matrix.shape[1] % per_word))).reshape(len(matrix), -1, per_word)
    words = np.zeros(matrix.shape[:2], np.uint64)
    for place, index in enumerate(order or range(per_word)):
        words |= matrix[:, :, index] << np.uint64(place * bits)
    words = words.astype(np.uint32).view(np.int32)
    return torch.from_numpy(np.ascontiguousarray(words.T if dim == 0 else words))


def awq(layer: str, weight_OI: torch.Tensor, group_size: int) -> tuple[Tensors, torch.Tensor]:
    """The tensors of AutoAWQ's gemm version, and (integer - zero) * scale in float16."""
    groups_I = adjacent(weight_OI.shape[1], group_size)
    integers_OI, scales_OG, zeros_OG = rounded(weight_OI, 4, groups_I, symmetric=False)
    tensors = {
        f"{layer}.qweight": packed(integers_OI.t(), 4, 1, AWQ_ORDER),
        f"{layer}.qzeros": packed(zeros_OG.t(), 4, 1, AWQ_ORDER),
        f"{layer}.scales": scales_OG.t().contiguous(),
    }
    return tensors, (integers_OI - zeros_OG[:, groups_I]).half() * scales_OG[:, groups_I]


def gptq(
    layer: str,
    weight_OI: torch.Tensor,
    bits: int,
    group_size: int,
    *,
    symmetric: bool = True,
    act_order: bool = False,
    zero_offset: int = 1,
    has_groups: bool = True,
) -> tuple[Tensors, torch.Tensor]:
    """The tensors of AutoGPTQ, and scales[g_idx] * (integer - zeros[g_idx]) in float16. zero_offset: what the format
    subtracts from zeros: 1, or 0 for gptq_v2. GPTQModel subtracts it from whole words, so that a zero of 0 borrows from
    the next one."""
    groups_I = adjacent(weight_OI.shape[1], group_size)
    if act_order:
        order = torch.randperm(len(groups_I), generator=torch.Generator().manual_seed(len(groups_I)))
        groups_I = groups_I[order]
    integers_OI, scales_OG, zeros_OG = rounded(weight_OI, bits, groups_I, symmetric=symmetric)
    tensors = {
        f"{layer}.qweight": packed(integers_OI.t(), bits, 0),
        f"{layer}.qzeros": packed(zeros_OG.t(), bits, 1) - packed(torch.full_like(zeros_OG.t(), zero_offset), bits, 1),
        f"{layer}.scales": scales_OG.t().contiguous(),
    }
    if has_groups:
        tensors[f"{layer}.g_idx"] = groups_I.int()
    return tensors, scales_OG[:, groups_I] * (integers_OI - zeros_OG[:, groups_I]).half()


def pack_quantized(
    layer: str,
    weight_OI: torch.Tensor,
    bits: int,
    group_size: int,
    *,
    symmetric: bool = True,
    act_order: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensors, torch.Tensor]:
    """The tensors of compressed-tensors' pack-quantized format, and (integer - zero) * scale in dtype."""
    num_outputs, num_inputs = weight_OI.shape
    groups_I = adjacent(num_inputs, group_size)
    if act_order:
        groups_I = groups_I[torch.randperm(num_inputs, generator=torch.Generator().manual_seed(num_inputs))]
    integers_OI, scales_OG, zeros_OG = rounded(weight_OI, bits, groups_I, symmetric=symmetric, dtype=dtype)
    tensors = {
        f"{layer}.weight_packed": packed(integers_OI, bits, 1),
        f"{layer}.weight_scale": scales_OG,
        f"{layer}.weight_shape": torch.tensor([num_outputs, num_inputs]),
    }
    if not symmetric:
        tensors[f"{layer}.weight_zero_point"] = packed(zeros_OG, bits, 0)
    if act_order:
        tensors[f"{layer}.weight_g_idx"] = groups_I.int()
    return tensors, (integers_OI - zeros_OG[:, groups_I]).to(dtype) * scales_OG[:, groups_I]
