"""The interface of drafting heads, and what all of them share.

A head predicts the token after the next one. At position i it combines the target's hidden state there with the
embedding of the token at i + 1, and passes both through its layers, which have a KV cache of their own under the
target's block tables. From the result come the logits of the token at i + 2 and, in place of a target's state, the
input of the next position: so k drafts take k passes.

Legend: T tokens, S tokens whose logits are wanted, E hidden size of the head, V vocabulary of its drafts.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from kernels.backend import Backend
from kernels.linear import PackedLinear
from worker.layers.embedding import Embedding
from worker.layers.forward_context import TargetStates, current
from worker.layers.rotary import Rotary
from worker.models.heads.config import HeadConfig


class Head(ABC):
    def __init__(
        self,
        config: HeadConfig,
        embedding: Embedding,
        output: PackedLinear,
        backend: Backend,
        target_ids_V: torch.Tensor | None = None,
    ) -> None:
        """output: the output head with the norm before it. target_ids_V: the token of each of its entries, int64; None:
        they are the token ids themselves."""
        self.config, self.backend = config, backend
        self.rotary = Rotary(config.layers.ropes, config.layers.rope_size, backend)
        self._embedding, self._output, self._target_ids_V = embedding, output, target_ids_V

    @abstractmethod
    def states_of(self, target: TargetStates) -> torch.Tensor:
        """Returns what `forward` reads of the target: float32 [T, E]. Called within torch.inference_mode."""

    def forward(self, hidden_TE: torch.Tensor, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Returns the states for the next positions and for `logits`, float32 [T, E], in the workspace. Called within a
        ForwardContext, whose slots and tables are those of positions i.

        hidden_TE: at positions i, from `states_of` or from a pass before. token_ids_T: the tokens at i + 1.
        """
        workspace, num_tokens = current().workspace, len(token_ids_T)
        embeddings = self._embedding(token_ids_T, workspace)
        assert isinstance(embeddings, torch.Tensor)
        x_TE = workspace.take("stream", num_tokens, self.config.hidden_size, dtype=torch.float32)
        self._compute_into_(x_TE, hidden_TE, embeddings)
        return x_TE

    @abstractmethod
    def _compute_into_(self, x_TE: torch.Tensor, hidden_TE: torch.Tensor, embeddings: torch.Tensor) -> None:
        """Fills x_TE with what the layers make of the states and the embeddings."""

    def likeliest(self, hidden_SE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the likeliest tokens after rows of `forward`'s result, int64 [S], and their logits, float32 [S]: not
        finite if the row's are not."""
        ids_S, largest_S = self._output.argmax(hidden_SE)
        return ids_S if self._target_ids_V is None else self._target_ids_V[ids_S], largest_S

    def logits(self, hidden_SE: torch.Tensor) -> torch.Tensor:
        """Returns logits of all the target's tokens after rows of `forward`'s result, float32; -inf for those that the
        head can't draft."""
        drafts_SV = self._output(hidden_SE).float()
        if self._target_ids_V is None:
            return drafts_SV
        logits = drafts_SV.new_full((len(drafts_SV), self.config.target.vocab_size), -torch.inf)
        logits[:, self._target_ids_V] = drafts_SV
        return logits


def buffer_like(x_TE: torch.Tensor, name: str) -> torch.Tensor:
    """Returns memory of the workspace."""
    return current().workspace.take(name, *x_TE.shape, dtype=torch.float32)


def side_by_side(name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Joins [T, ...] tensors along the last dim, in a buffer of the workspace."""
    widths = [part.shape[1] for part in parts]
    joined = current().workspace.take(name, len(parts[0]), sum(widths), dtype=torch.float32)
    for part, place in zip(parts, joined.split(widths, dim=1), strict=True):
        place.copy_(part)
    return joined
