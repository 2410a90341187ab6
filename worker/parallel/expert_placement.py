"""Decides which rank has which experts, and which experts get copies."""

from functools import cached_property

import numpy as np
import torch

_EMPTY = -1


class ExpertPlacement:
    """The slots of all ranks and the experts in them. Experts are divided among ranks in order, and the first ranks get
    one more if they don't divide evenly; an expert's rank is its home and never changes. The other slots hold copies of
    experts whose home is another rank. Slots are numbered consecutively over the ranks, each rank's own experts first.
    """

    def __init__(self, num_experts: int, num_ranks: int, num_redundant: int = 0) -> None:
        """num_redundant: slots for copies, all empty. Raises ValueError, naming the options and what would work."""
        if num_ranks > num_experts:
            raise ValueError(
                f"enable_expert_parallel: the model's {num_experts} experts can't be dealt out over {num_ranks} ranks "
                f"(tensor_parallel_size x data_parallel_size); {num_experts} ranks or less work"
            )
        self.num_experts, self.num_ranks = num_experts, num_ranks
        self._slots = _dealt(num_experts + num_redundant, num_ranks)
        self._homes = _dealt(num_experts, num_ranks)
        # int64, -1 in empty slots.
        self.experts_S = torch.full((num_experts + num_redundant,), _EMPTY)
        for slots, experts in zip(self._slots, self._homes, strict=True):
            self.experts_S[slots.start : slots.start + len(experts)] = torch.arange(experts.start, experts.stop)

    def with_copies(self, experts: dict[int, int]) -> "ExpertPlacement":
        """Returns a placement with these copies. experts: by slot; all other slots for copies are empty."""
        placement = ExpertPlacement(self.num_experts, self.num_ranks, len(self.experts_S) - self.num_experts)
        for slot, expert in experts.items():
            assert slot in self.copy_slots_of(int(self.ranks_S[slot]))
            placement.experts_S[slot] = expert
        return placement

    @property
    def copies(self) -> dict[int, int]:
        """The copies, by slot, in order; empty slots are left out."""
        slots = [slot for rank in range(self.num_ranks) for slot in self.copy_slots_of(rank)]
        return {slot: expert for slot in slots if (expert := int(self.experts_S[slot])) != _EMPTY}

    def experts_of(self, rank: int) -> range:
        """The experts whose home is this rank."""
        return self._homes[rank]

    def home_slots_of(self, rank: int) -> range:
        """The slots of the rank's own experts, in the order of `experts_of`."""
        first = self._slots[rank].start
        return range(first, first + len(self._homes[rank]))

    def copy_slots_of(self, rank: int) -> range:
        return range(self.home_slots_of(rank).stop, self._slots[rank].stop)

    @cached_property
    def homes_N(self) -> torch.Tensor:
        """int64: the home rank of each expert."""
        return _ranks(self._homes)

    @cached_property
    def ranks_S(self) -> torch.Tensor:
        """int64: the rank of each slot."""
        return _ranks(self._slots)

    def slots(self, experts_DTK: torch.Tensor) -> torch.Tensor:
        """Returns the slot that computes each token (index T) for each of its experts, [D, T, K] like experts_DTK; -1:
        no expert. Successive tokens take an expert's slots in turn."""
        tokens_T = torch.arange(experts_DTK.shape[1])
        experts = experts_DTK.clamp(min=0)
        copies = tokens_T[:, None] % self._num_copies_N[experts]
        return self._slots_NC[experts, copies].where(experts_DTK >= 0, -1)

    @cached_property
    def _num_copies_N(self) -> torch.Tensor:
        """How many slots hold each expert, its home included."""
        return (self.experts_S + 1).bincount(minlength=self.num_experts + 1)[1:]

    @cached_property
    def _slots_NC(self) -> torch.Tensor:
        """The slots of each expert; entries beyond its _num_copies_N are never read."""
        num_empty = int((self.experts_S == _EMPTY).sum())
        slots = self.experts_S.argsort(stable=True)[num_empty:]
        slots_NC = torch.zeros(self.num_experts, int(self._num_copies_N.max()), dtype=torch.int64)
        slots_NC[torch.arange(slots_NC.shape[1]) < self._num_copies_N[:, None]] = slots
        return slots_NC


def _dealt(total: int, num_ranks: int) -> list[range]:
    least, more = divmod(total, num_ranks)
    return [range(r * least + min(r, more), (r + 1) * least + min(r + 1, more)) for r in range(num_ranks)]


def _ranks(of_each: list[range]) -> torch.Tensor:
    return torch.arange(len(of_each)).repeat_interleave(torch.tensor([len(each) for each in of_each]))


def balanced(placement: ExpertPlacement, tokens_N: np.ndarray) -> ExpertPlacement:
    """Returns the placement with the copies that best even out the experts' loads, tokens_N (int64 [N]). The result is
    the same on all ranks.

    Slots stay empty if no copy would help. A rank has an expert at most once.
    """
    free = [list(placement.copy_slots_of(rank)) for rank in range(placement.num_ranks)]
    has_NR = np.zeros((placement.num_experts, placement.num_ranks), np.bool_)
    for rank in range(placement.num_ranks):
        has_NR[placement.experts_of(rank), rank] = True
    copies: dict[int, int] = {}
    while True:
        num_copies_N = has_NR.sum(axis=1)
        share_N, share_with_one_more_N = tokens_N / num_copies_N, tokens_N / (num_copies_N + 1)
        loads_R = share_N @ has_NR
        # Change of the sum of squared loads if rank r gets a copy of expert n: ranks that have n lose load, r gains.
        less_N = share_N - share_with_one_more_N
        lost_N = less_N * (less_N * num_copies_N - 2 * (has_NR @ loads_R))
        change_NR = lost_N[:, None] + share_with_one_more_N[:, None] * (share_with_one_more_N[:, None] + 2 * loads_R)
        change_NR[has_NR] = np.inf
        change_NR[:, [not slots for slots in free]] = np.inf
        # On ties, the lowest expert, then the lowest rank.
        expert, rank = divmod(int(change_NR.argmin()), placement.num_ranks)
        if change_NR[expert, rank] >= 0:
            return placement.with_copies(copies)
        copies[free[rank].pop(0)] = expert
        has_NR[expert, rank] = True
