"""The output head: logits of the vocabulary, which is split over the tensor-parallel ranks.

Legend: S tokens whose logits are wanted, E hidden size, V vocabulary, P a rank's part of it (the last rank's may be
smaller), R ranks.
"""

import torch

from kernels.backend import Backend
from kernels.linear import PackedLinear, PackedWeight, Residual, Stream
from kernels.sampling import TokenMasks
from worker.parallel.groups import Group


class OutputHead:
    """The model's last norm and its output projection. Takes rows of the residual stream after the last layer. group:
    the ranks that share the vocabulary."""

    def __init__(self, linear: PackedLinear, vocab_size: int, backend: Backend) -> None:
        """linear: this rank's part, with the norm before it."""
        self._linear, self._vocab_size, self._path = linear, vocab_size, backend

    @property
    def num_bytes(self) -> int:
        return self._linear.num_bytes

    @property
    def packed(self) -> PackedWeight | None:
        """This rank's weights without the norm; see PackedLinear.packed."""
        return self._linear.packed

    def logits(self, hidden_SE: Stream, group: Group, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns [S, V], float32 or, on a GPU, the compute dtype. out: memory for the result, on a GPU."""
        if not len(hidden_SE):
            return torch.empty(0, self._vocab_size, device=self._path.device)
        if group.size == 1:
            logits_SV = self._linear(hidden_SE, out)
        else:
            logits_SV = self._gathered(self._linear(hidden_SE), group)
            logits_SV = logits_SV if out is None else out.copy_(logits_SV)
        return logits_SV if self._path.gpu is not None else logits_SV.float()

    def argmax(
        self, hidden_SE: Stream, out: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the most likely tokens of this rank's part, as PackedLinear.argmax does."""
        return self._linear.argmax(hidden_SE, out)

    def masked_argmax(self, hidden_SE: Stream, masks: TokenMasks) -> tuple[torch.Tensor, torch.Tensor]:
        """On a CPU, where this rank has the whole vocabulary: see PackedLinear.masked_argmax."""
        return self._linear.masked_argmax(hidden_SE, masks)

    def write_part(self, hidden_SE: Residual, out_SP: torch.Tensor) -> None:
        """On a GPU: writes this rank's logits into the first columns of out_SP."""
        self._linear(hidden_SE, out_SP[:, : self._linear.num_outputs])

    def gather(self, part_SP: torch.Tensor, out_SV: torch.Tensor, group: Group) -> None:
        """Fills out_SV [S, V] from the parts that the ranks have written, all of the same width."""
        parts_RSP = group.gather(part_SP)
        width = part_SP.shape[1]
        for first, part in zip(range(0, self._vocab_size, width), parts_RSP, strict=True):
            out_SV[:, first : first + width].copy_(part[:, : self._vocab_size - first])

    def likeliest(self, part_SP: torch.Tensor, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        """On a GPU: returns the most likely tokens of the whole vocabulary (int64 [S]) and their logits (float32 [S]),
        from the parts that the ranks have written; see kernels.sampling.triton.greedy."""
        from kernels.sampling.triton import greedy  # imports Triton

        ids_S, largest_S = greedy(part_SP[:, : self._linear.num_outputs])
        return self.likeliest_of_all(ids_S.long(), largest_S, group)

    def likeliest_of_all(
        self, ids_S: torch.Tensor, largest_S: torch.Tensor, group: Group
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the most likely tokens of the vocabulary, given those of each rank's part; the lowest id on ties."""
        if group.size == 1:
            return ids_S, largest_S
        first_id = group.rank * self._part_size(group)
        # Logits are sent as their bits, in one tensor with the ids.
        both_2S = torch.stack((ids_S + first_id, largest_S.view(torch.int32).long()))
        ids_RS, bits_RS = group.gather(both_2S).unbind(1)
        largest_RS = bits_RS.int().view(torch.float32)
        # On ties the first rank wins; NaN beats all numbers.
        best_1S = largest_RS.argmax(0, keepdim=True)
        return ids_RS.gather(0, best_1S)[0], largest_RS.gather(0, best_1S)[0]

    def _part_size(self, group: Group) -> int:
        """Vocabulary entries of a rank; the last rank may have fewer."""
        return -(-self._vocab_size // group.size)

    def _gathered(self, logits_SP: torch.Tensor, group: Group) -> torch.Tensor:
        """Returns [S, V], gathered from all ranks' parts of the vocabulary."""
        missing = self._part_size(group) - logits_SP.shape[1]
        if missing:
            logits_SP = torch.nn.functional.pad(logits_SP, (0, missing))
        return group.gather(logits_SP).transpose(0, 1).flatten(1)[:, : self._vocab_size].contiguous()
