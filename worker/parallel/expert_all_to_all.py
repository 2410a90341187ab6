"""Many tokens: each goes only where one of its experts is.

Legend: D replicas, T tokens of the replica that has the most, N ranks that experts are dealt out over, K experts of a
token, E hidden size, P pairs of a token and one of its experts, A tokens that arrive.
"""

import torch

from worker.parallel.expert_exchange import ExpertExchange, Holder


class AllToAllExchange(ExpertExchange):
    """A replica's tokens are dealt out over its ranks. Each sends its part to ranks of other replicas (those of its own
    have all of it), gets the results, and in the end the parts are gathered."""

    @property
    def _part_size(self) -> int:
        """Tokens of a rank; the last ones may have fewer, or none."""
        return -(-self.num_tokens_D[self.data.rank] // self.tensor.size)

    @property
    def part(self) -> slice:
        num_tokens, first = self.num_tokens_D[self.data.rank], self.tensor.rank * self._part_size
        return slice(min(first, num_tokens), min(first + self._part_size, num_tokens))

    def results(self, h_TE: torch.Tensor, experts_TK: torch.Tensor, holder: Holder) -> torch.Tensor:
        experts_DTK = self.without_padding(self.gathered(experts_TK.int()))
        slots_DTK, ranks_DTK = holder.find(experts_DTK)
        owners_DT = self._owners(experts_DTK.shape[1])
        h_RE, rows_DT = self._brought(h_TE, ranks_DTK, owners_DT)

        pairs = replicas_P, tokens_P, _ = (ranks_DTK == self.experts.rank).nonzero(as_tuple=True)
        y_PE = holder.compute(h_RE, rows_DT[replicas_P, tokens_P], slots_DTK[pairs])

        sent_N = owners_DT[replicas_P, tokens_P].bincount(minlength=self.experts.size)
        return self.returned(y_PE, sent_N, ranks_DTK[self.data.rank, self.part])

    def complete_(self, x_TE: torch.Tensor) -> None:
        if self.tensor.size > 1:
            part_TE = x_TE[self.part]
            padded_TE = torch.nn.functional.pad(part_TE, (0, 0, 0, self._part_size - len(part_TE)))
            x_TE.copy_(self.tensor.gather(padded_TE).flatten(0, 1)[: len(x_TE)])

    def _owners(self, num_tokens: int) -> torch.Tensor:
        """int64 [D, T]: the rank in whose part each token is."""
        part_sizes_D = torch.tensor([-(-count // self.tensor.size) for count in self.num_tokens_D])
        members_DT = torch.arange(num_tokens) // part_sizes_D.clamp(min=1)[:, None]
        return torch.arange(self.data.size)[:, None] * self.tensor.size + members_DT

    def _brought(
        self, h_TE: torch.Tensor, ranks_DTK: torch.Tensor, owners_DT: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[R, E]: the replica's own tokens, and those that arrive, and where in it those of all replicas are."""
        num_replicas, num_tokens, _ = ranks_DTK.shape
        own, num_ranks = self.data.rank, self.experts.size
        rows_DT = torch.arange(num_tokens).repeat(num_replicas, 1)
        if num_replicas == 1:
            return h_TE, rows_DT
        # Where there is no expert, rank -1: the last of these, which is none.
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
