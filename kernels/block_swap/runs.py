"""Which blocks a swap can copy at once: runs that are neighbours in both pools."""

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Run(NamedTuple):
    """Blocks source, source + 1, ... of one pool, that go to target, target + 1, ... of the other."""

    source: int
    target: int
    num_blocks: int


def merge_runs(source_blocks: Sequence[int], target_blocks: Sequence[int]) -> list[Run]:
    """The fewest runs that copy source_blocks[i] to target_blocks[i] for each i, by ascending source.

    A copy of the DMA engine costs the host some 5 us to start, whatever its size, and a swap has one a run and layer:
    blocks of a sequence that was admitted at once are mostly neighbours. The pools are different memory, so the order
    of the pairs means nothing. Raises ValueError if the lists differ in length, for a negative block, and for a target
    that is named twice.
    """
    if len(source_blocks) != len(target_blocks):
        raise ValueError(f"{len(source_blocks)} source blocks for {len(target_blocks)} target blocks: one is due each")
    if len(set(target_blocks)) != len(target_blocks):
        twice = next(block for block in target_blocks if list(target_blocks).count(block) > 1)
        raise ValueError(f"target block {twice} is named more than once; its contents would depend on chance")
    runs: list[Run] = []
    for source, target in sorted(zip(source_blocks, target_blocks, strict=True)):
        if min(source, target) < 0:
            raise ValueError(f"block {min(source, target)}: blocks are numbered from 0")
        last = runs[-1] if runs else None
        if last is not None and (source, target) == (last.source + last.num_blocks, last.target + last.num_blocks):
            runs[-1] = last._replace(num_blocks=last.num_blocks + 1)
        else:
            runs.append(Run(source, target, 1))
    return runs


def copy_runs(
    source_layers: Sequence[torch.Tensor], target_layers: Sequence[torch.Tensor], runs: Sequence[Run]
) -> None:
    """Copies the runs in each layer, without waiting for the copies if the memory allows that.

    Layers: [blocks, ...], of one shape but for dim 0 and of one dtype; a block is contiguous and beside its neighbours.
    """
    for source_N, target_M in zip(source_layers, target_layers, strict=True):
        for run in runs:
            target_M[run.target : run.target + run.num_blocks].copy_(
                source_N[run.source : run.source + run.num_blocks], non_blocking=True
            )
