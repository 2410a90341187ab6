"""Embedding, one token at a time."""

import torch


def embedding(ids_T: torch.Tensor, table_VN: torch.Tensor, first_id: int = 0) -> torch.Tensor:
    """[T, N]; row t is table_VN[ids_T[t] - first_id], or zeros if the table has no such row."""
    out_TN = torch.zeros(len(ids_T), table_VN.shape[1], dtype=table_VN.dtype)
    for token, token_id in enumerate(ids_T.tolist()):
        if first_id <= token_id < first_id + len(table_VN):
            out_TN[token] = table_VN[token_id - first_id]
    return out_TN
