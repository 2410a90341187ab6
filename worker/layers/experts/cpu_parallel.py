"""Whole experts on several CPU ranks, with copies of the busiest ones."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from kernels.backend import Backend
from kernels.elementwise.rms_norm import rms_norm
from kernels.linear import PackedWeight, Stream
from kernels.native.library import NativeKernels
from worker.layers.experts.cpu import CpuExpert
from worker.layers.experts.router import Router
from worker.layers.experts.shared import SharedExpert
from worker.layers.forward_context import current
from worker.layers.residual import LayerOutput, add_sum_of_ranks_
from worker.model_config import ExpertsConfig
from worker.parallel.expert_exchange import exchange_for
from worker.parallel.expert_placement import ExpertPlacement, balanced
from worker.parallel.groups import Group, Groups
from worker.weights.reader import WeightReader


class CpuExpertCopies:
    """The copies of one mixture's experts on one rank. Every step_interval steps, each rank chooses the copies anew;
    all choose the same, because they count the same tokens. Weights then move at the beginning of that step. A new
    epoch begins without copies, because a restarted rank has none."""

    def __init__(self, held: dict[int, CpuExpert], placement: ExpertPlacement, backend: Backend) -> None:
        """held: the rank's own experts, by slot; copies are added to it. placement: without copies. Raises ValueError
        without C++ kernels, which pack weights in the same way on all ranks."""
        if backend.native is None:
            raise ValueError("num_redundant_experts needs the C++ kernels, because weights are sent packed; use 0")
        self._kernels: NativeKernels = backend.native
        self._path, self._interval = backend, backend.experts.step_interval
        self._held, self._placement, self._without_copies = held, placement, placement
        # The epoch's groups, and the tokens counted when it began or when copies were last chosen.
        self._groups: Groups | None = None
        self._seen_N = np.zeros(placement.num_experts, np.int64)

    def begin_step(self, groups: Groups, tokens_N: np.ndarray) -> ExpertPlacement:
        """Returns the step's placement. All ranks call this in the same steps. tokens_N: int64, tokens of each expert
        so far; all ranks have counted the same since the epoch began."""
        if groups is not self._groups:
            self._groups, self._seen_N = groups, tokens_N.copy()
            self._placement = self._without_copies
        elif groups.experts.step % self._interval == 0:
            self.move(balanced(self._without_copies, tokens_N - self._seen_N), groups.experts)
            self._seen_N = tokens_N.copy()
        return self._placement

    def move(self, placement: ExpertPlacement, group: Group) -> None:
        """Sends weights so that the ranks have the copies of `placement`. All ranks of the group call this."""
        rank, homes, ranks = group.rank, placement.homes_N.tolist(), placement.ranks_S.tolist()
        before = self._placement.copies
        moved = [(slot, expert) for slot, expert in placement.copies.items() if before.get(slot) != expert]
        self._placement = placement
        if not moved:
            return
        # In the order of slots, hence of target ranks.
        sent = [(ranks[slot], self._own(expert)) for slot, expert in moved if homes[expert] == rank]
        arriving = sorted((homes[expert], slot) for slot, expert in moved if ranks[slot] == rank)
        sources = torch.tensor([source for source, _ in arriving], dtype=torch.int64)
        targets = torch.tensor([target for target, _ in sent], dtype=torch.int64)
        headers = torch.tensor(
            [[number for weight in expert.packed for number in _header(weight)] for _, expert in sent],
            dtype=torch.int64,
        ).view(-1, 2, 4)
        arrived = group.exchange(headers, _counts(targets, group), _counts(sources, group))
        panels = [weight.panels for _, expert in sent for weight in expert.packed]
        bytes_in = group.exchange(
            torch.cat(panels) if panels else torch.empty(0, dtype=torch.uint8),
            _counts(targets, group, headers[:, :, 3].sum(1)),
            _counts(sources, group, arrived[:, :, 3].sum(1)),
        ).split(arrived[:, :, 3].flatten().tolist())
        for index, (_, slot) in enumerate(arriving):
            self._put(slot, arrived[index].tolist(), bytes_in[2 * index : 2 * index + 2])

    def _own(self, expert: int) -> CpuExpert:
        rank = self._path.experts.rank
        return self._held[self._placement.home_slots_of(rank)[self._placement.experts_of(rank).index(expert)]]

    def _put(self, slot: int, headers: list[list[int]], panels: tuple[torch.Tensor, ...]) -> None:
        """Stores a copy, in the old copy's memory if it fits: parts of a large mapping cannot be freed alone."""
        old = self._held[slot].packed if slot in self._held else ()
        if [_header(weight) for weight in old] == headers:
            for weight, new in zip(old, panels, strict=True):
                weight.panels.copy_(new)
            return
        packed = [
            PackedWeight(
                kind=kind,
                num_rows=num_rows,
                num_inputs=num_inputs,
                panels=self._kernels.weights.empty(num_bytes, torch.uint8).copy_(new),
            )
            for (kind, num_rows, num_inputs, num_bytes), new in zip(headers, panels, strict=True)
        ]
        self._held[slot] = CpuExpert.of_packed(packed, self._path)


def _header(weight: PackedWeight) -> list[int]:
    return [int(weight.kind), weight.num_rows, weight.num_inputs, weight.panels.nbytes]


def _counts(ranks: torch.Tensor, group: Group, each: torch.Tensor | None = None) -> list[int]:
    """Counts how often each rank of the group occurs in `ranks`, or sums the values of `each` per rank."""
    counts = torch.zeros(group.size, dtype=torch.int64)
    return counts.index_add_(0, ranks, torch.ones_like(ranks) if each is None else each).tolist()


class ParallelCpuExperts:
    """Whole experts split over ranks. Gives the same bits as worker.layers.experts.cpu.CpuExperts on one rank."""

    def __init__(
        self,
        config: ExpertsConfig,
        router: Router,
        norm_E: torch.Tensor,
        eps: float,
        tensors: Sequence[Sequence[str]],
        reader: WeightReader,
        backend: Backend,
        *,
        shared: SharedExpert | None = None,
        layer: int,
    ) -> None:
        """tensors: names of each expert's gate, up and down. layer: its number, for counting experts. Experts of other
        ranks are not read. Raises ValueError if there are more ranks than experts, or if each of a token's experts gets
        a different input: a token is sent only once."""
        if config.scales_inputs and config.num_experts_per_token > 1:
            raise ValueError(
                f"enable_expert_parallel does not support num_experts_per_tok={config.num_experts_per_token} in models "
                "that multiply experts' inputs by router weights: only 1 works"
            )
        if backend.experts.num_redundant and config.has_linear_biases:
            raise ValueError(
                "num_redundant_experts does not support experts with biases, since weights alone move; use 0"
            )
        self._scales_inputs = config.scales_inputs
        self._norm_E, self._eps, self._dtype = norm_E, eps, backend.compute_dtype
        self._router, self._shared, self._top_k = router, shared, config.num_experts_per_token
        self._layer = layer
        experts = backend.experts
        placement = ExpertPlacement(config.num_experts, experts.size, experts.num_redundant)
        own = zip(placement.home_slots_of(experts.rank), placement.experts_of(experts.rank), strict=True)
        # By slot. A slot for copies may still hold an old copy.
        self._held = {slot: CpuExpert.load(tensors[expert], config, reader, backend) for slot, expert in own}
        self._placement = placement
        self._copies = CpuExpertCopies(self._held, placement, backend) if experts.num_redundant else None

    @property
    def num_bytes(self) -> int:
        held = (self._router, *self._held.values())
        return sum(each.num_bytes for each in (held if self._shared is None else (*held, self._shared)))

    def __call__(self, x_TE: Stream) -> LayerOutput:
        return LayerOutput(self._add_to_, is_summed=True)

    def _add_to_(self, x_TE: Stream) -> None:
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
        results_AKE = exchange.results(sent_TE, experts_TK, self._find, self._compute)
        x_AE, weights_AK1 = x_TE[exchange.part], weights_TK[exchange.part, :, None]
        for place in range(self._top_k):
            x_AE += weights_AK1[:, place] * results_AKE[:, place].float()
        exchange.complete_(x_TE)
        if self._shared is not None:
            add_sum_of_ranks_(x_TE, partial(self._shared.add_to_, h_TE=h_TE))

    def _find(self, experts_DTK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See worker.parallel.expert_exchange.Find."""
        current().count_experts(self._layer, experts_DTK)
        slots_DTK = self._placement.slots(experts_DTK)
        return slots_DTK, self._placement.ranks_S[slots_DTK].where(slots_DTK >= 0, -1)

    def _compute(self, h_RE: torch.Tensor, rows_P: torch.Tensor, slots_P: torch.Tensor) -> torch.Tensor:
        """See worker.parallel.expert_exchange.Compute."""
        results_PE = h_RE.new_empty(len(rows_P), h_RE.shape[1])
        for slot in slots_P.unique().tolist():
            pairs = (slots_P == slot).nonzero()[:, 0]
            results_PE[pairs] = self._held[slot](h_RE[rows_P[pairs]])
        return results_PE

    def _routed(self, x_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns normed activations, and each token's weights and experts, in the order of experts' numbers."""
        h_TE = rms_norm(x_TE, self._norm_E, self._eps, self._dtype)
        if not len(x_TE):
            return h_TE, x_TE.new_empty(0, self._top_k), torch.empty(0, self._top_k, dtype=torch.int64)
        weights_TK, experts_TK = self._router(h_TE)
        experts_TK, places_TK = experts_TK.sort(dim=1)
        return h_TE, weights_TK.gather(1, places_TK), experts_TK
