"""Which rank has which expert of a mixture.

Legend: N experts, S slots: places for an expert; C copies of the expert that has the most.
"""

from functools import cached_property

import torch


class ExpertPlacement:
    """Slots are dealt out over ranks in their order, the first ranks having one more if they can't be even. Each holds
    an expert; each expert is in one slot at least."""

    def __init__(self, experts_S: torch.Tensor, num_ranks: int) -> None:
        """experts_S: int64, the expert in each slot, of which there are num_ranks at least."""
        self.experts_S, self.num_ranks = experts_S, num_ranks
        least, more = divmod(len(experts_S), num_ranks)
        self._slots = [range(r * least + min(r, more), (r + 1) * least + min(r + 1, more)) for r in range(num_ranks)]

    @classmethod
    def even(cls, num_experts: int, num_ranks: int) -> "ExpertPlacement":
        """Each expert once, in the order of their numbers. Raises ValueError, naming the options and what would
        work."""
        if num_ranks > num_experts:
            raise ValueError(
                f"enable_expert_parallel: the model's {num_experts} experts can't be dealt out over {num_ranks} ranks "
                f"(tensor_parallel_size x data_parallel_size); {num_experts} ranks or less work"
            )
        return cls(torch.arange(num_experts), num_ranks)

    def slots_of(self, rank: int) -> range:
        return self._slots[rank]

    @cached_property
    def ranks_S(self) -> torch.Tensor:
        """int64: where each slot is."""
        return torch.arange(self.num_ranks).repeat_interleave(torch.tensor([len(each) for each in self._slots]))

    def slots(self, experts_DTK: torch.Tensor) -> torch.Tensor:
        """The slot that computes each token (index T) for each of its experts, [D, T, K] like these; -1 where there is
        none. Of an expert's copies the tokens take one after the other."""
        tokens_T = torch.arange(experts_DTK.shape[1])
        experts = experts_DTK.clamp(min=0)
        copies = tokens_T[:, None] % self._num_copies_N[experts]
        return self._slots_NC[experts, copies].where(experts_DTK >= 0, -1)

    @cached_property
    def _num_copies_N(self) -> torch.Tensor:
        return self.experts_S.bincount()

    @cached_property
    def _slots_NC(self) -> torch.Tensor:
        """Of each expert; what is beyond its copies is never read."""
        num_copies_N = self._num_copies_N
        slots_S = self.experts_S.argsort(stable=True)
        slots_NC = torch.zeros(len(num_copies_N), int(num_copies_N.max()), dtype=torch.int64)
        slots_NC[torch.arange(slots_NC.shape[1]) < num_copies_N[:, None]] = slots_S
        return slots_NC
