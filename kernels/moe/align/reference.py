"""Alignment in plain Python."""

import torch


def align_reference(experts_TK: torch.Tensor, num_experts: int, block_m: int) -> list[tuple[int, list[int]]]:
    """Returns (expert, pairs) of each non-empty block; an expert's last block may have fewer than block_m pairs."""
    flat = experts_TK.flatten().tolist()
    blocks = []
    for expert in range(num_experts):
        pairs = [pair for pair, of in enumerate(flat) if of == expert]
        blocks += [(expert, pairs[i : i + block_m]) for i in range(0, len(pairs), block_m)]
    return blocks
