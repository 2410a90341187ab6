"""Block copy, one block at a time."""

import torch


def block_copy(
    source_N: torch.Tensor, target_M: torch.Tensor, source_blocks_C: torch.Tensor, target_blocks_C: torch.Tensor
) -> None:
    for source, target in zip(source_blocks_C.tolist(), target_blocks_C.tolist(), strict=True):
        target_M[target] = source_N[source]
