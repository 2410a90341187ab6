"""Token embeddings.

Legend: T tokens, E hidden size, V vocabulary.
"""

import torch

from worker.workspace import Workspace


def embed(embeddings_VE: torch.Tensor, token_ids_T: torch.Tensor, workspace: Workspace) -> torch.Tensor:
    """float32 [T, E], in the workspace: the beginning of the residual stream."""
    num_tokens, hidden_size = len(token_ids_T), embeddings_VE.shape[1]
    x_TE = workspace.take("residual", num_tokens, hidden_size)
    if embeddings_VE.dtype is torch.float32:
        return torch.index_select(embeddings_VE, 0, token_ids_T, out=x_TE)
    rows_TE = workspace.take("embeddings", num_tokens, hidden_size, dtype=embeddings_VE.dtype)
    return x_TE.copy_(torch.index_select(embeddings_VE, 0, token_ids_T, out=rows_TE))
