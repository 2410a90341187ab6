"""A step's attention plans, one for each reach that layers have."""

from kernels.compute_path import ComputePath
from kernels.paged_attention import AttentionPlan, AttentionPlanner
from kernels.paged_attention.triton_plan import TritonAttentionPlan
from worker.gpu.batch import GpuBatch
from worker.input_batch import InputBatch
from worker.kv_cache import KVCache
from worker.local_heads import LocalHeads
from worker.model_config import ModelConfig
from worker.reach import Reach


class CpuAttentionPlans:
    def __init__(self, config: ModelConfig, path: ComputePath) -> None:
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
        self._plans: dict[Reach, AttentionPlan] = {}
        self._updated: list[TritonAttentionPlan] = []
        for reach in config.reaches:
            plan = TritonAttentionPlan(
                path,
                LocalHeads(config, path.shard).shape,
                *reach,
                max_num_seqs=max_num_seqs,
                max_context_len=max_context_len,
            )
            self._updated.append(plan)
            self._plans[reach] = plan

    def __call__(self, batch: GpuBatch) -> dict[Reach, AttentionPlan]:
        """The same objects in each step."""
        for plan in self._updated:
            plan.update(
                query_starts=batch.query_starts,
                context_lens_S=batch.context_lens_S,
                block_tables_RB=batch.block_tables_RB,
                rows_S=batch.rows_S,
                max_query_len=batch.max_query_len,
            )
        return self._plans
