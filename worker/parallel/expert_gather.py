"""Few tokens: all go everywhere, in one call, and results come back in another.

Legend: D replicas, T tokens of the replica that has the most, N ranks that experts are dealt out over, K experts of a
token, E hidden size, P pairs of a token and one of its experts.
"""

import torch

from worker.parallel.expert_exchange import ExpertExchange, Holder

# Numbers of experts travel behind activations, whatever dtype those are.
_CHOICE = torch.int32


class GatherExchange(ExpertExchange):
    """Activations of all replicas are gathered at each rank; results go to all ranks of the token's replica."""

    @property
    def part(self) -> slice:
        return slice(None)

    def results(self, h_TE: torch.Tensor, experts_TK: torch.Tensor, holder: Holder) -> torch.Tensor:
        num_tokens, hidden_size = h_TE.shape
        all_DTX = self.gathered(torch.cat((h_TE, experts_TK.to(_CHOICE).view(h_TE.dtype)), dim=1))
        experts_DTK = self.without_padding(all_DTX[:, :, hidden_size:].contiguous().view(_CHOICE))
        slots_DTK, ranks_DTK = holder.find(experts_DTK)

        pairs = replicas_P, tokens_P, _ = (ranks_DTK == self.experts.rank).nonzero(as_tuple=True)
        rows_P = replicas_P * experts_DTK.shape[1] + tokens_P
        y_PE = holder.compute(all_DTX[:, :, :hidden_size].flatten(0, 1), rows_P, slots_DTK[pairs])

        sent_D, copies = replicas_P.bincount(minlength=self.data.size), self.tensor.size
        if copies > 1:
            y_PE = torch.cat([part for part in y_PE.split(sent_D.tolist()) for _ in range(copies)])
        return self.returned(y_PE, sent_D.repeat_interleave(copies), ranks_DTK[self.data.rank, :num_tokens])

    def complete_(self, x_TE: torch.Tensor) -> None:
        pass
