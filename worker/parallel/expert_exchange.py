"""Sends tokens to the ranks that have their experts: to all ranks by one gather, or to some by all-to-all."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import pad

from configs.options import Options
from worker.errors import PermanentError
from worker.model_config import ModelConfig
from worker.parallel.groups import Groups

# Takes experts_DTK. Returns the slot that computes each token for each of its experts, and that slot's rank, both int64
# and shaped like experts_DTK; -1: no expert. The result is the same on all ranks.
Find = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
# Takes h_RE, rows_P and slots_P. Returns [P, E], in h's dtype: in row i, the result of the expert in slots_P[i], a slot
# of this rank, for row rows_P[i] of h.
Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class ExpertExchange(ABC):
    """The exchange of one step. All ranks of the expert group make the same calls."""

    def __init__(self, groups: Groups, num_tokens_D: Sequence[int]) -> None:
        """num_tokens_D: tokens of the step at each replica, not all of them 0."""
        self.tensor, self.data, self.experts = groups.tensor, groups.data, groups.experts
        self.num_tokens_D = num_tokens_D

    @property
    @abstractmethod
    def part(self) -> slice:
        """The replica's tokens whose results come back to this rank."""
        ...

    @abstractmethod
    def results(self, h_TE: torch.Tensor, experts_TK: torch.Tensor, find: Find, compute: Compute) -> torch.Tensor:
        """Returns [tokens of `part`, K, E], in h's dtype: the results of experts_TK (int64). h_TE: the replica's
        tokens, contiguous, the same on all ranks of the tensor group."""
        ...

    @abstractmethod
    def complete_(self, x_TE: torch.Tensor) -> None:
        """Completes x_TE in place: this rank's part of the replica's tokens is up to date before, all of them after."""
        ...

    def gathered(self, x_TX: torch.Tensor) -> torch.Tensor:
        """Returns [D, T, X]: each replica's x_TX. Rows beyond a replica's tokens have undefined contents."""
        return self.data.gather(pad(x_TX, (0, 0, 0, max(self.num_tokens_D) - len(x_TX))))

    def without_padding(self, experts_DTK: torch.Tensor) -> torch.Tensor:
        """Returns experts_DTK as int64, with -1 beyond a replica's tokens."""
        _, num_tokens, _ = experts_DTK.shape
        is_padding_DT = torch.arange(num_tokens) >= torch.tensor(self.num_tokens_D)[:, None]
        return experts_DTK.long().masked_fill_(is_padding_DT[:, :, None], -1)

    def returned(self, y_PE: torch.Tensor, sent_N: torch.Tensor, ranks_TK: torch.Tensor) -> torch.Tensor:
        """Returns [T, K, E], collected from all ranks. y_PE: this rank's results for others, sent_N[i] rows to rank i.
        ranks_TK: the rank that each result comes from; one rank's results arrive in order."""
        ranks_P = ranks_TK.flatten()
        received_N = ranks_P.bincount(minlength=self.experts.size)
        arrived_PE = self.experts.exchange(y_PE, sent_N.tolist(), received_N.tolist())
        results_PE = torch.empty_like(arrived_PE)
        results_PE[ranks_P.argsort(stable=True)] = arrived_PE
        return results_PE.unflatten(0, ranks_TK.shape)


# Experts' numbers are sent in this dtype, appended to activations of any dtype.
_CHOICE = torch.int32


class GatherExchange(ExpertExchange):
    """Gathers the activations of all replicas on each rank; results go to all ranks of the token's replica."""

    @property
    def part(self) -> slice:
        return slice(None)

    def results(self, h_TE: torch.Tensor, experts_TK: torch.Tensor, find: Find, compute: Compute) -> torch.Tensor:
        num_tokens, hidden_size = h_TE.shape
        all_DTX = self.gathered(torch.cat((h_TE, experts_TK.to(_CHOICE).view(h_TE.dtype)), dim=1))
        experts_DTK = self.without_padding(all_DTX[:, :, hidden_size:].contiguous().view(_CHOICE))
        slots_DTK, ranks_DTK = find(experts_DTK)

        pairs = replicas_P, tokens_P, _ = (ranks_DTK == self.experts.rank).nonzero(as_tuple=True)
        rows_P = replicas_P * experts_DTK.shape[1] + tokens_P
        y_PE = compute(all_DTX[:, :, :hidden_size].flatten(0, 1), rows_P, slots_DTK[pairs])

        sent_D, copies = replicas_P.bincount(minlength=self.data.size), self.tensor.size
        if copies > 1:
            y_PE = torch.cat([part for part in y_PE.split(sent_D.tolist()) for _ in range(copies)])
        return self.returned(y_PE, sent_D.repeat_interleave(copies), ranks_DTK[self.data.rank, :num_tokens])

    def complete_(self, x_TE: torch.Tensor) -> None:
        pass


class AllToAllExchange(ExpertExchange):
    """Divides a replica's tokens among its ranks. Each rank sends its part to ranks of other replicas (those of its own
    replica have all tokens) and receives the results; at the end the parts are gathered."""

    @property
    def _part_size(self) -> int:
        """Tokens of a rank; the last ranks may have fewer, or none."""
        return -(-self.num_tokens_D[self.data.rank] // self.tensor.size)

    @property
    def part(self) -> slice:
        num_tokens, first = self.num_tokens_D[self.data.rank], self.tensor.rank * self._part_size
        return slice(min(first, num_tokens), min(first + self._part_size, num_tokens))

    def results(self, h_TE: torch.Tensor, experts_TK: torch.Tensor, find: Find, compute: Compute) -> torch.Tensor:
        experts_DTK = self.without_padding(self.gathered(experts_TK.int()))
        slots_DTK, ranks_DTK = find(experts_DTK)
        owners_DT = self._owners(experts_DTK.shape[1])
        h_RE, rows_DT = self._brought(h_TE, ranks_DTK, owners_DT)

        pairs = replicas_P, tokens_P, _ = (ranks_DTK == self.experts.rank).nonzero(as_tuple=True)
        y_PE = compute(h_RE, rows_DT[replicas_P, tokens_P], slots_DTK[pairs])

        sent_N = owners_DT[replicas_P, tokens_P].bincount(minlength=self.experts.size)
        return self.returned(y_PE, sent_N, ranks_DTK[self.data.rank, self.part])

    def complete_(self, x_TE: torch.Tensor) -> None:
        if self.tensor.size > 1:
            part_TE = x_TE[self.part]
            padded_TE = torch.nn.functional.pad(part_TE, (0, 0, 0, self._part_size - len(part_TE)))
            x_TE.copy_(self.tensor.gather(padded_TE).flatten(0, 1)[: len(x_TE)])

    def _owners(self, num_tokens: int) -> torch.Tensor:
        """Returns int64 [D, T]: the rank whose part each token is in."""
        part_sizes_D = torch.tensor([-(-count // self.tensor.size) for count in self.num_tokens_D])
        members_DT = torch.arange(num_tokens) // part_sizes_D.clamp(min=1)[:, None]
        return torch.arange(self.data.size)[:, None] * self.tensor.size + members_DT

    def _brought(
        self, h_TE: torch.Tensor, ranks_DTK: torch.Tensor, owners_DT: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns [R, E], the replica's own tokens and then those that arrive, and [D, T], each token's row in it."""
        num_replicas, num_tokens, _ = ranks_DTK.shape
        own, num_ranks = self.data.rank, self.experts.size
        rows_DT = torch.arange(num_tokens).repeat(num_replicas, 1)
        if num_replicas == 1:
            return h_TE, rows_DT
        # Rank -1, no expert, marks the last column, which is never read.
        needs_DTN = torch.zeros(num_replicas, num_tokens, num_ranks + 1, dtype=torch.bool)
        needs_DTN.scatter_(2, ranks_DTK % (num_ranks + 1), True)
        first = own * self.tensor.size
        needs_DTN[own, :, first : first + self.tensor.size] = False

        ranks_A, tokens_A = needs_DTN[own, self.part, :num_ranks].T.nonzero(as_tuple=True)
        arriving = needs_DTN[:, :, self.experts.rank].nonzero(as_tuple=True)
        arrived_AE = self.experts.exchange(
            h_TE[self.part][tokens_A],
            ranks_A.bincount(minlength=num_ranks).tolist(),
            owners_DT[arriving].bincount(minlength=num_ranks).tolist(),
        )
        rows_DT[arriving] = torch.arange(len(arrived_AE)) + len(h_TE)
        return torch.cat((h_TE, arrived_AE)), rows_DT


# Over all replicas. A gather saves one or two calls, but sends data that no rank needs. Gather against all-to-all,
# hidden size 2048, 8 of 64 experts, over loopback, 2 x 2 ranks on 2 cores: 6.2 ms against 9.3 with 16 tokens, 9.7
# against 9.2 with 32, 39 against 25 with 256.
GATHERED_TOKENS = 32


def check_experts(options: Options, config: ModelConfig) -> None:
    """Raises PermanentError if enable_expert_parallel is on but the model has no experts."""
    if options.enable_expert_parallel and config.experts is None:
        raise PermanentError(
            f"enable_expert_parallel: a {config.architecture} has no experts to divide among ranks; leave it out"
        )


def exchange_for(groups: Groups, num_tokens_D: Sequence[int]) -> ExpertExchange:
    """Chooses the exchange for the step. num_tokens_D: tokens of the step at each replica, known to all ranks, so that
    all choose the same."""
    cls = GatherExchange if sum(num_tokens_D) <= GATHERED_TOKENS else AllToAllExchange
    return cls(groups, num_tokens_D)
