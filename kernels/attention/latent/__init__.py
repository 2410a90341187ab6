"""Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434) with absorbed weights: its plans, as in
kernels.attention.plan."""

from functools import partial

import torch

from kernels.attention.latent.native import NativeMlaPlan
from kernels.attention.latent.torch_cpu import TorchMlaPlan
from kernels.attention.plan import Planner, TritonPlan
from kernels.backend import Backend
from kernels.kv_cache.layout import KVScales, LatentShape


class MlaPlanner(Planner):
    """A planner for queries of [T, H, L + R] and results of [T, H, L]; the cache is [blocks, block size, L + R]."""

    def __init__(self, backend: Backend, shape: LatentShape) -> None:
        native = backend.native
        super().__init__(None if native is None else NativeMlaPlan(native, shape), partial(TorchMlaPlan, shape))


class TritonMlaPlan(TritonPlan):
    """A GPU plan, for queries and results as in `MlaPlanner`."""

    def __init__(self, backend: Backend, shape: LatentShape, *, max_num_seqs: int, max_context_len: int) -> None:
        """Raises ValueError for sizes that the kernels don't support."""
        from kernels.attention.latent.triton import MlaSchedule, mla_attention  # imports Triton

        schedule = MlaSchedule(
            shape,
            max_num_seqs=max_num_seqs,
            max_context_len=max_context_len,
            cache_dtype=backend.kv_cache_dtype,
            device=backend.device,
        )
        super().__init__(schedule)
        self._attention = partial(mla_attention, schedule=schedule)

    def attend(
        self,
        q_THD: torch.Tensor,
        cache: torch.Tensor,
        scale: float,
        out: torch.Tensor | None = None,
        kv_scales: KVScales | None = None,
        soft_cap: float = 0.0,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See AttentionPlan. Queries of padding get zeros, or stay as they are in `out`. kv_scales: for an e4m3 cache,
        whose one scale is `k`."""
        assert not soft_cap
        assert sinks_H is None
        kv_scale = None if kv_scales is None else kv_scales.k
        return self._attention(
            q_THD,
            cache,
            **self._step,  # pyright: ignore[reportArgumentType] - as `update` made it
            scale=scale,
            kv_scale=kv_scale,
            may_split=self._may_split,
            out=out,
        )


__all__ = ["MlaPlanner", "TritonMlaPlan"]
