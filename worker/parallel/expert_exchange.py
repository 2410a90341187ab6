"""How tokens come to the ranks that have their experts, and what these give comes back.

What comes back is what each expert gives for each token, and the token's own replica adds that up. So a token's bits
depend neither on the way, nor on where experts are, nor on other tokens, and are those of one rank that has them all.

Legend: D replicas, T tokens of the replica that has the most, N ranks that experts are dealt out over, K experts of a
token, E hidden size, P pairs of a token and one of its experts, R rows of activations.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch.nn.functional import pad

from worker.parallel.groups import Groups


class Holder(Protocol):
    """A rank's experts of one mixture."""

    def find(self, experts_DTK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The slot that computes each token for each of its experts, and the rank that has it, int64 like these; -1
        where there is no expert. The same on all ranks."""
        ...

    def compute(self, h_RE: torch.Tensor, rows_P: torch.Tensor, slots_P: torch.Tensor) -> torch.Tensor:
        """[P, E], like h: what the expert in slots_P[i], one of this rank's, gives for row rows_P[i] of h."""
        ...


class ExpertExchange(ABC):
    """Of one step. All ranks of the expert group make the same calls."""

    def __init__(self, groups: Groups, num_tokens_D: Sequence[int]) -> None:
        """num_tokens_D: tokens of the step at each replica, not all of them 0."""
        self.tensor, self.data, self.experts = groups.tensor, groups.data, groups.experts
        self.num_tokens_D = num_tokens_D

    @property
    @abstractmethod
    def part(self) -> slice:
        """Of the replica's tokens, those whose results come back to this rank."""
        ...

    @abstractmethod
    def results(self, h_TE: torch.Tensor, experts_TK: torch.Tensor, holder: Holder) -> torch.Tensor:
        """[tokens of `part`, K, E], like h: what experts_TK (int64) give for the replica's tokens. h_TE: contiguous,
        the same on all ranks of the tensor group."""
        ...

    @abstractmethod
    def complete_(self, x_TE: torch.Tensor) -> None:
        """Of the replica's tokens, this rank's part is up to date: so are all of them then, in place."""
        ...

    def gathered(self, x_TX: torch.Tensor) -> torch.Tensor:
        """[D, T, X]: that of each replica. Rows beyond a replica's tokens hold anything."""
        return self.data.gather(pad(x_TX, (0, 0, 0, max(self.num_tokens_D) - len(x_TX))))

    def without_padding(self, experts_DTK: torch.Tensor) -> torch.Tensor:
        """The same, int64, and -1 beyond a replica's tokens."""
        _, num_tokens, _ = experts_DTK.shape
        is_padding_DT = torch.arange(num_tokens) >= torch.tensor(self.num_tokens_D)[:, None]
        return experts_DTK.long().masked_fill_(is_padding_DT[:, :, None], -1)

    def returned(self, y_PE: torch.Tensor, sent_N: torch.Tensor, ranks_TK: torch.Tensor) -> torch.Tensor:
        """[T, K, E] from all ranks. y_PE: what this rank sends, sent_N[i] rows to rank i. ranks_TK: whence each of the
        results comes; of one rank they come in order."""
        ranks_P = ranks_TK.flatten()
        received_N = ranks_P.bincount(minlength=self.experts.size)
        arrived_PE = self.experts.exchange(y_PE, sent_N.tolist(), received_N.tolist())
        results_PE = torch.empty_like(arrived_PE)
        results_PE[ranks_P.argsort(stable=True)] = arrived_PE
        return results_PE.unflatten(0, ranks_TK.shape)
