"""Host memory for the KV of sequences that were preempted by swap: a second pool of blocks."""

import numpy as np
import torch

from kernels.block_copy import block_copy
from protos import step_pb2
from worker.errors import PlanError
from worker.kv_cache import KVCache


class SwapSpace:
    """Host blocks, numbered from 0, each of all layers of a KV cache. What a free one holds means nothing."""

    def __init__(self, kv_cache: KVCache, num_blocks: int) -> None:
        """Memory is taken when it is first written, as far as the system works so."""
        self._kv_cache = kv_cache
        self.num_blocks = num_blocks
        self._layers = [torch.empty((num_blocks, *layer.shape[1:]), dtype=layer.dtype) for layer in kv_cache.layers]

    def apply(self, plan: step_pb2.StepPlan) -> None:
        """Copies a plan's blocks out, then others in. Raises PlanError before anything is copied."""
        if not (plan.swap_out_blocks or plan.swap_out_host_blocks or plan.swap_in_blocks or plan.swap_in_host_blocks):
            return
        last_block = self._kv_cache.num_blocks - 1
        sources_out = _ids(plan.swap_out_blocks, "swap_out_blocks", 1, last_block)
        targets_out = _ids(plan.swap_out_host_blocks, "swap_out_host_blocks", 0, self.num_blocks - 1)
        sources_in = _ids(plan.swap_in_host_blocks, "swap_in_host_blocks", 0, self.num_blocks - 1)
        targets_in = _ids(plan.swap_in_blocks, "swap_in_blocks", 1, last_block)
        for name, sources, targets in (
            ("swap_out_host_blocks", sources_out, targets_out),
            ("swap_in_blocks", sources_in, targets_in),
        ):
            if len(sources) != len(targets):
                raise PlanError(f"{name}: {len(targets)} entries for {len(sources)} blocks to copy")
            if len(targets.unique()) != len(targets):
                raise PlanError(f"{name}: a block is named twice")
        for layer, host in zip(self._kv_cache.layers, self._layers, strict=True):
            block_copy(layer, host, sources_out, targets_out)
            block_copy(host, layer, sources_in, targets_in)


def _ids(values, field: str, first: int, last: int) -> torch.Tensor:  # a repeated uint32
    ids = np.fromiter(values, np.int64, len(values))
    outside = ids[(ids < first) | (ids > last)]
    if len(outside):
        raise PlanError(f"{field}: {outside[0]}; there are blocks {first} to {last}")
    return torch.from_numpy(ids)
