"""A step's attention plans: one for each attention span in the model."""

from kernels.attention.latent import MlaPlanner, TritonMlaPlan
from kernels.attention.paged import AttentionPlanner, TritonAttentionPlan
from kernels.attention.plan import AttentionPlan, StepRows
from kernels.backend import Backend
from kernels.kv_cache.layout import LatentShape
from worker.layers.kv_cache import KVCache, LocalHeads
from worker.model_config import AttentionSpan, LatentConfig, ModelConfig
from worker.step.batch import GpuBatch, InputBatch


def step_rows(batch: InputBatch, kv_cache: KVCache) -> StepRows:
    """The rows of a step on a CPU."""
    return StepRows(
        query_starts=batch.query_starts,
        context_lens=batch.context_lens_S,
        block_tables=batch.block_tables_SB,
        block_size=kv_cache.block_size,
        cache_dtype=kv_cache.dtype,
    )


class CpuAttentionPlans:
    def __init__(self, config: ModelConfig, backend: Backend) -> None:
        self._planners: dict[AttentionSpan, AttentionPlanner | MlaPlanner]
        if config.latent is not None:
            self._planners = {AttentionSpan(): MlaPlanner(backend, _latent_shape(config, config.latent, backend))}
        else:
            heads = LocalHeads(config, backend.shard).shape
            self._planners = {span: AttentionPlanner(backend, heads, *span) for span in config.attention_spans}

    def __call__(self, batch: InputBatch, kv_cache: KVCache) -> dict[AttentionSpan, AttentionPlan]:
        """Returns the step's plans, valid until the next call."""
        if not self._planners:
            return {}
        context = batch.max_blocks * kv_cache.block_size
        for planner in self._planners.values():
            planner.reserve(num_queries=batch.max_tokens, num_rows=batch.max_rows, context=context)
        step = step_rows(batch, kv_cache)
        return {span: planner.plan(step) for span, planner in self._planners.items()}


class GpuAttentionPlans:
    def __init__(
        self,
        config: ModelConfig,
        backend: Backend,
        *,
        max_num_seqs: int,
        max_context_len: int,
        most_queries: int = 1,
    ) -> None:
        """most_queries: of a row that decodes, 1 and its drafts."""
        most = {"max_num_seqs": max_num_seqs, "max_context_len": max_context_len}
        self._updated: dict[AttentionSpan, TritonAttentionPlan | TritonMlaPlan]
        if config.latent is not None:
            self._updated = {
                AttentionSpan(): TritonMlaPlan(backend, _latent_shape(config, config.latent, backend), **most)
            }
        else:
            heads = LocalHeads(config, backend.shard).shape
            self._updated = {
                span: TritonAttentionPlan(backend, heads, *span, **most, most_queries=most_queries)
                for span in config.attention_spans
            }
        self._plans: dict[AttentionSpan, AttentionPlan] = dict(self._updated.items())

    def __call__(self, batch: GpuBatch) -> dict[AttentionSpan, AttentionPlan]:
        """Updates the plans for the step and returns them: the same objects in each step."""
        for plan in self._updated.values():
            plan.update(
                query_starts=batch.query_starts,
                context_lens_S=batch.context_lens_S,
                block_tables_RB=batch.block_tables_RB,
                rows_S=batch.rows_S,
                max_query_len=batch.max_query_len,
                host_rows=batch.host_rows,
            )
        return self._plans


def _latent_shape(config: ModelConfig, latent: LatentConfig, backend: Backend) -> LatentShape:
    """Returns the shape of one rank's part."""
    heads = backend.shard.of(config.num_heads, "num_attention_heads")
    return latent.shape(heads.stop - heads.start)
