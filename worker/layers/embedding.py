"""Token embeddings.

Legend: T tokens, E hidden size, V vocabulary.
"""

import torch

from kernels.compute_path import ComputePath
from kernels.embedding.cpu import embedding
from worker.workspace import Workspace


class Embedding:
    def __init__(self, table_VE: torch.Tensor, path: ComputePath) -> None:
        self._table_VE, self._kernels = table_VE, path.native

    @property
    def num_bytes(self) -> int:
        return self._table_VE.nbytes

    def __call__(self, token_ids_T: torch.Tensor, workspace: Workspace) -> torch.Tensor:
        """float32 [T, E], in the workspace: the beginning of the residual stream."""
        x_TE = workspace.take("residual", len(token_ids_T), self._table_VE.shape[1])
        return embedding(token_ids_T, self._table_VE, self._kernels, out=x_TE)
