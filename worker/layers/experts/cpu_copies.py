"""Copies of experts that get many tokens, at ranks where they are not at home.

Legend: N experts.
"""

import numpy as np
import torch

from kernels.compute_path import ComputePath
from kernels.linear import PackedWeight
from kernels.native import NativeKernels
from worker.layers.experts.cpu import CpuExpert
from worker.parallel.expert_copies import balanced
from worker.parallel.expert_placement import ExpertPlacement
from worker.parallel.group import Group
from worker.parallel.groups import Groups


class CpuExpertCopies:
    """Of one mixture, at one rank. Every step_interval steps its ranks choose copies anew, each by itself and all
    alike, for they count the same tokens; what is to move then moves within that step, before anything else. In a new
    epoch there are no copies at first: a rank that was started again has none."""

    def __init__(self, held: dict[int, CpuExpert], placement: ExpertPlacement, path: ComputePath) -> None:
        """held: the rank's own experts, by slot, to which copies are added. placement: without copies. Raises
        ValueError without C++ kernels, which pack weights alike everywhere."""
        if path.native is None:
            raise ValueError("num_redundant_experts needs the C++ kernels, for weights are sent packed; use 0")
        self._kernels: NativeKernels = path.native
        self._path, self._interval = path, path.experts.step_interval
        self._held, self._placement, self._without_copies = held, placement, placement
        # Of the epoch, and the tokens counted when it began, or when copies were chosen last.
        self._groups: Groups | None = None
        self._seen_N = np.zeros(placement.num_experts, np.int64)

    def begin_step(self, groups: Groups, tokens_N: np.ndarray) -> ExpertPlacement:
        """What the step goes by. Called by all ranks in the same steps. tokens_N: int64, of each expert so far, of
        which all ranks have counted the same since the epoch began."""
        if groups is not self._groups:
            self._groups, self._seen_N = groups, tokens_N.copy()
            self._placement = self._without_copies
        elif groups.experts.step % self._interval == 0:
            self.move(balanced(self._without_copies, tokens_N - self._seen_N), groups.experts)
            self._seen_N = tokens_N.copy()
        return self._placement

    def move(self, placement: ExpertPlacement, group: Group) -> None:
        """Called by all ranks of the group, which all have `placement` afterwards."""
        rank, homes, ranks = group.rank, placement.homes_N.tolist(), placement.ranks_S.tolist()
        before = self._placement.copies
        moved = [(slot, expert) for slot, expert in placement.copies.items() if before.get(slot) != expert]
        self._placement = placement
        if not moved:
            return
        # In the order of slots, and so of ranks.
        sent = [(ranks[slot], self._own(expert)) for slot, expert in moved if homes[expert] == rank]
        arriving = sorted((homes[expert], slot) for slot, expert in moved if ranks[slot] == rank)
        sources = torch.tensor([source for source, _ in arriving], dtype=torch.int64)
        targets = torch.tensor([target for target, _ in sent], dtype=torch.int64)
        headers = torch.tensor(
            [[number for weight in expert.packed for number in _header(weight)] for _, expert in sent],
            dtype=torch.int64,
        ).view(-1, 2, 4)  # fmt: skip
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
        """Into the memory of the copy before it: pieces of large mappings are not given back one by one."""
        old = self._held[slot].packed if slot in self._held else ()
        if [_header(weight) for weight in old] == headers:
            for weight, new in zip(old, panels, strict=True):
                weight.panels.copy_(new)
            return
        packed = [
            PackedWeight(
                kind=kind, num_rows=num_rows, num_inputs=num_inputs,
                panels=self._kernels.weights.empty(num_bytes, torch.uint8).copy_(new),
            )
            for (kind, num_rows, num_inputs, num_bytes), new in zip(headers, panels, strict=True)
        ]  # fmt: skip
        self._held[slot] = CpuExpert.of_packed(packed, self._path)


def _header(weight: PackedWeight) -> list[int]:
    return [int(weight.kind), weight.num_rows, weight.num_inputs, weight.panels.nbytes]


def _counts(ranks: torch.Tensor, group: Group, each: torch.Tensor | None = None) -> list[int]:
    """For each rank of the group how many there are of it, or the sum of theirs."""
    counts = torch.zeros(group.size, dtype=torch.int64)
    return counts.index_add_(0, ranks, torch.ones_like(ranks) if each is None else each).tolist()
