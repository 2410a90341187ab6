"""Whole experts on CPUs, each at one rank or several.

Legend: D replicas, T tokens, E hidden size, K experts of a token, P pairs of a token and one of its experts, R rows of
activations, A tokens whose results come back to this rank.
"""

from collections.abc import Sequence
from functools import partial

import torch

from kernels.compute_path import ComputePath
from kernels.linear import Stream
from kernels.rms_norm import rms_norm
from worker.experts_config import ExpertsConfig
from worker.forward_context import current
from worker.layers.experts.cpu import CpuExpert
from worker.layers.experts.cpu_copies import CpuExpertCopies
from worker.layers.experts.router import Router
from worker.layers.experts.shared import SharedExpert
from worker.layers.sum_of_ranks import add_sum_of_ranks_
from worker.parallel.expert_placement import ExpertPlacement
from worker.parallel.experts import exchange_for
from worker.take_tensor import TakeTensor


class ParallelCpuExperts:
    """Gives a token the bits that worker.layers.experts.cpu.CpuExperts of one rank gives it."""

    def __init__(
        self,
        config: ExpertsConfig,
        router: Router,
        norm_E: torch.Tensor,
        eps: float,
        tensors: Sequence[Sequence[str]],
        take: TakeTensor,
        path: ComputePath,
        *,
        shared: SharedExpert | None = None,
        layer: int,
    ) -> None:
        """tensors: names of each expert's gate, up and down. layer: its number, for whoever counts. Experts of other
        ranks are not read. Raises ValueError if there are more ranks than experts, or if a token is another one to each
        of its experts: it is sent once."""
        if config.scales_inputs and config.num_experts_per_token > 1:
            raise ValueError(
                f"enable_expert_parallel does not go with num_experts_per_tok={config.num_experts_per_token} where "
                "experts' inputs are multiplied by their weights; 1 does"
            )
        self._scales_inputs = config.scales_inputs
        self._norm_E, self._eps, self._dtype = norm_E, eps, path.compute_dtype
        self._router, self._shared, self._top_k = router, shared, config.num_experts_per_token
        self._layer = layer
        experts = path.experts
        placement = ExpertPlacement(config.num_experts, experts.size, experts.num_redundant)
        own = zip(placement.home_slots_of(experts.rank), placement.experts_of(experts.rank), strict=True)
        # By slot; in those for copies, whatever was there last.
        self._held = {slot: CpuExpert.load(tensors[expert], take, path) for slot, expert in own}
        self._placement = placement
        self._copies = CpuExpertCopies(self._held, placement, path) if experts.num_redundant else None

    @property
    def num_bytes(self) -> int:
        held = (self._router, *self._held.values())
        return sum(each.num_bytes for each in (held if self._shared is None else (*held, self._shared)))

    def add_to_(self, x_TE: Stream) -> None:
        assert isinstance(x_TE, torch.Tensor)
        context = current()
        if not any(context.num_tokens_D):
            return
        if self._copies is not None:
            assert context.expert_load is not None
            self._placement = self._copies.begin_step(context.groups, context.expert_load.tokens_N[self._layer])
        h_TE, weights_TK, experts_TK = self._routed(x_TE)
        exchange = exchange_for(context.groups, context.num_tokens_D)
        sent_TE = h_TE
        if self._scales_inputs:
            sent_TE, weights_TK = (weights_TK * h_TE).to(self._dtype), torch.ones_like(weights_TK)
        results_AKE = exchange.results(sent_TE, experts_TK, self)
        x_AE, weights_AK1 = x_TE[exchange.part], weights_TK[exchange.part, :, None]
        for place in range(self._top_k):
            x_AE += weights_AK1[:, place] * results_AKE[:, place].float()
        exchange.complete_(x_TE)
        if self._shared is not None:
            add_sum_of_ranks_(x_TE, partial(self._shared.add_to_, h_TE=h_TE))

    def find(self, experts_DTK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As worker.parallel.expert_exchange.Holder has it, and so `compute`."""
        current().count_experts(self._layer, experts_DTK)
        slots_DTK = self._placement.slots(experts_DTK)
        return slots_DTK, self._placement.ranks_S[slots_DTK].where(slots_DTK >= 0, -1)

    def compute(self, h_RE: torch.Tensor, rows_P: torch.Tensor, slots_P: torch.Tensor) -> torch.Tensor:
        results_PE = h_RE.new_empty(len(rows_P), h_RE.shape[1])
        for slot in slots_P.unique().tolist():
            pairs = (slots_P == slot).nonzero()[:, 0]
            results_PE[pairs] = self._held[slot](h_RE[rows_P[pairs]])
        return results_PE

    def _routed(self, x_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Normed activations; of each token its experts, in the order of their numbers, and their weights."""
        h_TE = rms_norm(x_TE, self._norm_E, self._eps, self._dtype)
        if not len(x_TE):
            return h_TE, x_TE.new_empty(0, self._top_k), torch.empty(0, self._top_k, dtype=torch.int64)
        weights_TK, experts_TK = self._router(h_TE)
        experts_TK, places_TK = experts_TK.sort(dim=1)
        return h_TE, weights_TK.gather(1, places_TK), experts_TK
