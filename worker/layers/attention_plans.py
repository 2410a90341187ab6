"""A step's attention plans, one for each reach that layers have."""

from kernels.compute_path import ComputePath
from kernels.mla_attention.planner import MlaPlanner
from kernels.mla_attention.shape import LatentShape
from kernels.mla_attention.triton_plan import TritonMlaPlan
from kernels.paged_attention import AttentionPlan, AttentionPlanner
from kernels.paged_attention.triton_plan import TritonAttentionPlan
from worker.deepseek_config import LatentConfig
from worker.gpu.batch import GpuBatch
from worker.input_batch import InputBatch
from worker.kv_cache import KVCache
from worker.local_heads import LocalHeads
from worker.model_config import ModelConfig
from worker.reach import Reach


class CpuAttentionPlans:
    def __init__(self, config: ModelConfig, path: ComputePath) -> None:
        self._planners: dict[Reach, AttentionPlanner | MlaPlanner]
        if config.latent is not None:
            self._planners = {Reach(): MlaPlanner(path, _latent_shape(config, config.latent, path))}
        else:
            heads = LocalHeads(config, path.shard).shape
            self._planners = {reach: AttentionPlanner(path, heads, *reach) for reach in config.reaches}

    def __call__(self, batch: InputBatch, kv_cache: KVCache) -> dict[Reach, AttentionPlan]:
        """Good until the next step's are made."""
        context = batch.max_blocks * kv_cache.block_size
        for planner in self._planners.values():
            planner.reserve(num_queries=batch.max_tokens, num_rows=batch.max_rows, context=context)
        return {
            reach: planner.plan(
                query_starts=batch.query_starts,
                context_lens=batch.context_lens_S,
                block_tables=batch.block_tables_SB,
                block_size=kv_cache.block_size,
                cache_dtype=kv_cache.layers[0].dtype,
            )
            for reach, planner in self._planners.items()
        }


class GpuAttentionPlans:
    def __init__(self, config: ModelConfig, path: ComputePath, *, max_num_seqs: int, max_context_len: int) -> None:
        most = {"max_num_seqs": max_num_seqs, "max_context_len": max_context_len}
        self._updated: dict[Reach, TritonAttentionPlan | TritonMlaPlan]
        if config.latent is not None:
            self._updated = {Reach(): TritonMlaPlan(path, _latent_shape(config, config.latent, path), **most)}
        else:
            heads = LocalHeads(config, path.shard).shape
            self._updated = {reach: TritonAttentionPlan(path, heads, *reach, **most) for reach in config.reaches}
        self._plans: dict[Reach, AttentionPlan] = dict(self._updated.items())

    def __call__(self, batch: GpuBatch) -> dict[Reach, AttentionPlan]:
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


def _latent_shape(config: ModelConfig, latent: LatentConfig, path: ComputePath) -> LatentShape:
    """Of a rank."""
    heads = path.shard.of(config.num_heads, "num_attention_heads")
    return latent.shape(heads.stop - heads.start)
