"""The blocks that a plan copies to host memory and back, checked."""

from dataclasses import dataclass

import numpy as np

from protos import step_pb2
from worker.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSwaps:
    """KV blocks out_blocks[i] go to host blocks out_host_blocks[i]; then host blocks in_host_blocks[i] to KV blocks
    in_blocks[i]. int64."""

    out_blocks: np.ndarray
    out_host_blocks: np.ndarray
    in_host_blocks: np.ndarray
    in_blocks: np.ndarray


def planned_swaps(plan: step_pb2.StepPlan, *, last_block: int, num_host_blocks: int) -> PlannedSwaps | None:
    """None: the plan swaps nothing. KV blocks that can be given out are 1 to last_block, host blocks are numbered from
    0. Raises PlanError."""
    if not (plan.swap_out_blocks or plan.swap_out_host_blocks or plan.swap_in_blocks or plan.swap_in_host_blocks):
        return None
    swaps = PlannedSwaps(
        out_blocks=_ids(plan.swap_out_blocks, "swap_out_blocks", 1, last_block),
        out_host_blocks=_ids(plan.swap_out_host_blocks, "swap_out_host_blocks", 0, num_host_blocks - 1),
        in_host_blocks=_ids(plan.swap_in_host_blocks, "swap_in_host_blocks", 0, num_host_blocks - 1),
        in_blocks=_ids(plan.swap_in_blocks, "swap_in_blocks", 1, last_block),
    )
    for name, sources, targets in (
        ("swap_out_host_blocks", swaps.out_blocks, swaps.out_host_blocks),
        ("swap_in_blocks", swaps.in_host_blocks, swaps.in_blocks),
    ):
        if len(sources) != len(targets):
            raise PlanError(f"{name}: {len(targets)} entries for {len(sources)} blocks to copy")
        if len(np.unique(targets)) != len(targets):
            raise PlanError(f"{name}: a block is named twice")
    return swaps


def _ids(values, field: str, first: int, last: int) -> np.ndarray:  # a repeated uint32
    ids = np.fromiter(values, np.int64, len(values))
    outside = ids[(ids < first) | (ids > last)]
    if len(outside):
        raise PlanError(f"{field}: {outside[0]}; there are blocks {first} to {last}")
    return ids
