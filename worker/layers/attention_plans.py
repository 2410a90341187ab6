"""A step's attention plans, one for each reach that layers have."""

from kernels.attention.latent import MlaPlanner, TritonMlaPlan
from kernels.attention.paged import AttentionPlanner, TritonAttentionPlan
from kernels.attention.plan import AttentionPlan, StepRows
from kernels.backend import Backend
from kernels.kv_cache.layout import LatentShape
from worker.layers.kv_cache import KVCache, LocalHeads
from worker.model_config import AttentionSpan, LatentConfig, ModelConfig
from worker.step.batch import GpuBatch, InputBatch


class CpuAttentionPlans:
    def __init__(self, config: ModelConfig, path: Backend) -> None:
        self._planners: dict[AttentionSpan, AttentionPlanner | MlaPlanner]
        if config.latent is not None:
            self._planners = {AttentionSpan(): MlaPlanner(path, _latent_shape(config, config.latent, path))}
        else:
            heads = LocalHeads(config, path.shard).shape
            self._planners = {reach: AttentionPlanner(path, heads, *reach) for reach in config.reaches}

    def __call__(self, batch: InputBatch, kv_cache: KVCache) -> dict[AttentionSpan, AttentionPlan]:
        """Good until the next step's are made."""
        context = batch.max_blocks * kv_cache.block_size
        for planner in self._planners.values():
            planner.reserve(num_queries=batch.max_tokens, num_rows=batch.max_rows, context=context)
        step = StepRows(
            query_starts=batch.query_starts,
            context_lens=batch.context_lens_S,
            block_tables=batch.block_tables_SB,
            block_size=kv_cache.block_size,
            cache_dtype=kv_cache.layers[0].dtype,
        )
        return {reach: planner.plan(step) for reach, planner in self._planners.items()}


class GpuAttentionPlans:
    def __init__(self, config: ModelConfig, path: Backend, *, max_num_seqs: int, max_context_len: int) -> None:
        most = {"max_num_seqs": max_num_seqs, "max_context_len": max_context_len}
        self._updated: dict[AttentionSpan, TritonAttentionPlan | TritonMlaPlan]
        if config.latent is not None:
            self._updated = {AttentionSpan(): TritonMlaPlan(path, _latent_shape(config, config.latent, path), **most)}
        else:
            heads = LocalHeads(config, path.shard).shape
            self._updated = {reach: TritonAttentionPlan(path, heads, *reach, **most) for reach in config.reaches}
        self._plans: dict[AttentionSpan, AttentionPlan] = dict(self._updated.items())

    def __call__(self, batch: GpuBatch) -> dict[AttentionSpan, AttentionPlan]:
        """The same objects in each step."""
        for plan in self._updated.values():
            plan.update(
                query_starts=batch.query_starts,
                context_lens_S=batch.context_lens_S,
                block_tables_RB=batch.block_tables_RB,
                rows_S=batch.rows_S,
                max_query_len=batch.max_query_len,
            )
        return self._plans


def _latent_shape(config: ModelConfig, latent: LatentConfig, path: Backend) -> LatentShape:
    """Of a rank."""
    heads = path.shard.of(config.num_heads, "num_attention_heads")
    return latent.shape(heads.stop - heads.start)
