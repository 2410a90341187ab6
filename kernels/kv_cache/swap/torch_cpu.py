"""Block copy with PyTorch's own indexing, on any pair of devices.

Legend: N and M blocks in the two pools, C blocks to copy; the other dims are a block's.
"""

import torch


def block_copy(
    source_N: torch.Tensor, target_M: torch.Tensor, source_blocks_C: torch.Tensor, target_blocks_C: torch.Tensor
) -> None:
    """target_M[target_blocks_C[i]] = source_N[source_blocks_C[i]] for each i.

    Both pools have blocks of one shape and dtype, and are different tensors. source_blocks_C, target_blocks_C: int64 on
    the CPU; target blocks are all different. The copied blocks are gathered first, which takes
    as much memory.
    """
    if source_N.dtype.itemsize == 1:
        # torch has no index_copy_ of e4m3.
        source_N, target_M = source_N.view(torch.uint8), target_M.view(torch.uint8)
    gathered_C = source_N.index_select(0, source_blocks_C.to(source_N.device))
    target_M.index_copy_(0, target_blocks_C.to(target_M.device), gathered_C.to(target_M.device))
