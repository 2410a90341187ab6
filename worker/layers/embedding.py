"""Token embeddings.

Legend: T tokens, E hidden size, V vocabulary.
"""

import torch

from kernels.backend import Backend
from kernels.elementwise.embedding.torch_cpu import embedding
from kernels.linear import Residual, Stream
from worker.layers.forward_context import EmbeddedInputs, Workspace, current


class Embedding:
    """The token embeddings. A tensor-parallel rank holds a part of the vocabulary and gives zeros for other ids; the
    sum over the ranks is the result."""

    def __init__(self, table_VE: torch.Tensor, backend: Backend, *, scale: float = 1.0, divisor: float = 1.0) -> None:
        """table_VE: the whole vocabulary, in the model's dtype. scale: multiplies each number; it is rounded to that
        dtype first, as in the training of models with a scale. divisor: divides the results; not rounded."""
        self._divisor = divisor
        self._first_id, self._scale = 0, torch.tensor(scale, dtype=table_VE.dtype).item() / divisor
        if backend.shard.size > 1:
            part = backend.shard.covering(len(table_VE), "vocab_size")
            # A copy: a view would keep the whole table in memory.
            table_VE, self._first_id = table_VE[part].clone(), part.start
        self._table_VE, self._kernels = table_VE.to(backend.device), backend.native
        self._on_gpu, self._is_part = backend.gpu is not None, backend.shard.size > 1

    @property
    def num_bytes(self) -> int:
        return self._table_VE.nbytes

    def __call__(self, token_ids_T: torch.Tensor, workspace: Workspace) -> Stream:
        """Returns the initial residual stream, [T, E], in the workspace. On a GPU, negative ids (padding) give
        zeros."""
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

    def replace(self, x_TE: Stream, embedded: EmbeddedInputs) -> None:
        """Replaces the embeddings of some tokens in what a call has returned. They are not scaled; each rank has all of
        them."""
        stream_TE = x_TE.x_TE if isinstance(x_TE, Residual) else x_TE
        embedded.put(stream_TE, divisor=self._divisor)
