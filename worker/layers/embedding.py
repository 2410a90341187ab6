"""Token embeddings.

Legend: T tokens, E hidden size, V vocabulary.
"""

import torch

from kernels.compute_path import ComputePath
from kernels.embedding.cpu import embedding
from kernels.linear import Residual, Stream
from worker.workspace import Workspace


class Embedding:
    def __init__(self, table_VE: torch.Tensor, path: ComputePath) -> None:
        self._table_VE, self._kernels = table_VE.to(path.device), path.native
        self._on_gpu = path.gpu is not None

    @property
    def num_bytes(self) -> int:
        return self._table_VE.nbytes

    def __call__(self, token_ids_T: torch.Tensor, workspace: Workspace) -> Stream:
        """The beginning of the residual stream, [T, E], in the workspace. On a GPU a negative id, as padding has it,
        gives zeros."""
        num_tokens, hidden_size = len(token_ids_T), self._table_VE.shape[1]
        x_TE = workspace.take("residual", num_tokens, hidden_size, dtype=torch.float32)
        if self._on_gpu:
            from kernels.embedding.gpu import embedding as gather  # imports Triton

            gather(token_ids_T, self._table_VE, out=x_TE)
            return Residual(x_TE, workspace.take("delta", num_tokens, hidden_size))
        return embedding(token_ids_T, self._table_VE, self._kernels, out=x_TE)
