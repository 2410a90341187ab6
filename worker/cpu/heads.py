"""Computes a drafting head on a CPU, over a KV cache of its own under the target's block tables.

Legend: T tokens, S rows that draft, E hidden size of the head.
"""

import torch

from worker.layers.attention_plans import CpuAttentionPlans
from worker.layers.forward_context import ForwardContext, TargetStates, Workspace, forward_context
from worker.layers.kv_cache import KVCache
from worker.models.heads.head import Head
from worker.parallel.groups import Groups
from worker.step.batch import InputBatch


class CpuHead:
    """Its calls are not recorded: a head is one layer, and what it reads of the target changes place."""

    def __init__(self, head: Head) -> None:
        self.head, self.config, self.backend = head, head.config, head.backend
        self._workspace = Workspace(head.backend)
        self._plans = CpuAttentionPlans(head.config.layers, head.backend)
        self._groups = Groups()

    def new_cache(self, *, num_blocks: int, block_size: int) -> KVCache:
        """Returns a KV cache of the head's layers. num_blocks counts the null block."""
        return KVCache(self.config.layers, num_blocks=num_blocks, block_size=block_size, backend=self.backend)

    @torch.inference_mode()
    def states_of(self, target: TargetStates) -> torch.Tensor:
        """See Head.states_of."""
        return self.head.states_of(target)

    @torch.inference_mode()
    def forward(self, batch: InputBatch, kv_cache: KVCache, hidden_TE: torch.Tensor) -> torch.Tensor:
        """Computes the head at the batch's positions and writes their KV. Returns float32 [T, E], in memory that the
        next call reuses: the states for the next positions, and for `likeliest` and `logits`.

        batch: its token_ids are the tokens one position on. hidden_TE: see Head.forward; not the memory of the last
        result.
        """
        workspace = self._workspace
        workspace.reserve(batch.num_tokens)
        context = ForwardContext(
            kv_cache=kv_cache,
            slots_T=batch.slots_T,
            cos_sin_tables=self.head.rotary(batch.positions_T, workspace),
            attention_plans=self._plans(batch, kv_cache),
            workspace=workspace,
            groups=self._groups,
            num_tokens_D=(batch.num_tokens,),
        )
        with forward_context(context):
            return self.head.forward(hidden_TE, batch.token_ids_T)

    @torch.inference_mode()
    def likeliest(self, hidden_SE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See Head.likeliest."""
        return self.head.likeliest(hidden_SE)

    @torch.inference_mode()
    def logits(self, hidden_SE: torch.Tensor) -> torch.Tensor:
        """See Head.logits."""
        return self.head.logits(hidden_SE)
