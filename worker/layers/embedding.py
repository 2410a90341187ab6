"""Token embeddings.

Legend: T tokens, E hidden size, V vocabulary.
"""

import torch

from kernels.backend import Backend
from kernels.elementwise.embedding.torch_cpu import embedding
from kernels.linear import Residual, Stream
from worker.layers.forward_context import Workspace, current


class Embedding:
    """A tensor-parallel rank has those of a part of the vocabulary, and zeros for other ids; the ranks add up."""

    def __init__(self, table_VE: torch.Tensor, backend: Backend, *, scale: float = 1.0) -> None:
        """table_VE: of the whole vocabulary, in the model's dtype. scale: that each number is multiplied by, rounded
        to that dtype first, as models with a scale were trained."""
        self._first_id, self._scale = 0, torch.tensor(scale, dtype=table_VE.dtype).item()
        if backend.shard.size > 1:
            part = backend.shard.covering(len(table_VE), "vocab_size")
            # A copy, so that the whole is not kept.
            table_VE, self._first_id = table_VE[part].clone(), part.start
        self._table_VE, self._kernels = table_VE.to(backend.device), backend.native
        self._on_gpu, self._is_part = backend.gpu is not None, backend.shard.size > 1

    @property
    def num_bytes(self) -> int:
        return self._table_VE.nbytes

    def __call__(self, token_ids_T: torch.Tensor, workspace: Workspace) -> Stream:
        """The beginning of the residual stream, [T, E], in the workspace. On a GPU a negative id, as padding has it,
        gives zeros."""
        num_tokens, hidden_size = len(token_ids_T), self._table_VE.shape[1]
        x_TE = workspace.take("residual", num_tokens, hidden_size, dtype=torch.float32)
        if self._on_gpu:
            from kernels.elementwise.embedding.triton import embedding as gather  # imports Triton

            gather(token_ids_T, self._table_VE, first_id=self._first_id, out=x_TE)
            if self._scale != 1.0:
                x_TE *= self._scale
            if self._is_part:
                current().group.sum_(x_TE)
            return Residual(x_TE, workspace.take("delta", num_tokens, hidden_size))
        if not self._is_part:
            return embedding(token_ids_T, self._table_VE, self._kernels, out=x_TE, scale=self._scale)
        local_T = token_ids_T - self._first_id
        elsewhere_T = (local_T < 0) | (local_T >= len(self._table_VE))
        embedding(local_T.masked_fill(elsewhere_T, 0), self._table_VE, self._kernels, out=x_TE, scale=self._scale)
        x_TE.masked_fill_(elsewhere_T[:, None], 0)
        current().group.sum_(x_TE)
        return x_TE
