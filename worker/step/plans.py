"""Reads the columns of a StepPlan. `Rows` says whether a plan is valid; what is not said to raise reads any plan."""

from dataclasses import dataclass

import numpy as np

from protos import step_pb2
from worker.errors import PlanError


def column_of(data: bytes, field: str, dtype: str) -> np.ndarray:
    """A column whose entries have this type. Raises PlanError for bytes that are no whole entries."""
    size = np.dtype(dtype).itemsize
    if len(data) % size:
        raise PlanError(f"{field}: {len(data)} bytes, but entries have {size} bytes each")
    return np.frombuffer(data, dtype)


def decoding_rows(plan: step_pb2.StepPlan) -> np.ndarray:
    """uint16: the rows that decode, without drafts and with them, in batch order."""
    data = plan.decode_rows + plan.rows_with_drafts
    return np.frombuffer(data[: len(data) // 2 * 2], "<u2")


def num_drafts_of(plan: step_pb2.StepPlan) -> int:
    return len(plan.draft_token_ids) // 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSwaps:
    """Block copies of a plan: first KV blocks out_blocks[i] to host blocks out_host_blocks[i], then host blocks
    in_host_blocks[i] to KV blocks in_blocks[i]. int64."""

    out_blocks: np.ndarray
    out_host_blocks: np.ndarray
    in_host_blocks: np.ndarray
    in_blocks: np.ndarray


def planned_swaps(plan: step_pb2.StepPlan, *, last_block: int, num_host_blocks: int) -> PlannedSwaps | None:
    """Returns a plan's swaps, checked, or None. KV blocks that can be allocated are 1 to last_block; host blocks are
    numbered from 0. Raises PlanError."""
    if not (plan.swap_out_blocks or plan.swap_out_host_blocks or plan.swap_in_blocks or plan.swap_in_host_blocks):
        return None
    swaps = PlannedSwaps(
        out_blocks=_swapped_blocks(plan.swap_out_blocks, "swap_out_blocks", 1, last_block),
        out_host_blocks=_swapped_blocks(plan.swap_out_host_blocks, "swap_out_host_blocks", 0, num_host_blocks - 1),
        in_host_blocks=_swapped_blocks(plan.swap_in_host_blocks, "swap_in_host_blocks", 0, num_host_blocks - 1),
        in_blocks=_swapped_blocks(plan.swap_in_blocks, "swap_in_blocks", 1, last_block),
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


def _swapped_blocks(values, field: str, first: int, last: int) -> np.ndarray:  # a repeated uint32
    ids = np.fromiter(values, np.int64, len(values))
    outside = ids[(ids < first) | (ids > last)]
    if len(outside):
        raise PlanError(f"{field}: {outside[0]}; there are blocks {first} to {last}")
    return ids
