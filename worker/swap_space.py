"""Host memory for the KV of sequences that were preempted by swap: a second pool of blocks, beside a KV cache that is
in host memory, too. (A GPU's: worker.gpu.swap.)"""

import torch

from kernels.block_copy import block_copy
from protos import step_pb2
from worker.kv_cache import KVCache
from worker.planned_swaps import planned_swaps


class SwapSpace:
    """Host blocks, numbered from 0, each of all layers of a KV cache. What a free one holds means nothing."""

    def __init__(self, kv_cache: KVCache, num_blocks: int) -> None:
        """Memory is taken when it is first written, as far as the system works so."""
        self._kv_cache = kv_cache
        self.num_blocks = num_blocks
        self._layers = [torch.empty((num_blocks, *layer.shape[1:]), dtype=layer.dtype) for layer in kv_cache.layers]

    def apply(self, plan: step_pb2.StepPlan) -> None:
        """Copies a plan's blocks out, then others in. Raises PlanError before anything is copied."""
        swaps = planned_swaps(plan, last_block=self._kv_cache.num_blocks - 1, num_host_blocks=self.num_blocks)
        if swaps is None:
            return
        sources_out, targets_out = torch.from_numpy(swaps.out_blocks), torch.from_numpy(swaps.out_host_blocks)
        sources_in, targets_in = torch.from_numpy(swaps.in_host_blocks), torch.from_numpy(swaps.in_blocks)
        for layer, host in zip(self._kv_cache.layers, self._layers, strict=True):
            block_copy(layer, host, sources_out, targets_out)
            block_copy(host, layer, sources_in, targets_in)
