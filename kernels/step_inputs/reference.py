"""The ops of this folder, one token, entry or row at a time."""

import torch


def expand(
    rows_S: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens_S: torch.Tensor,
    host_token_ids_T: torch.Tensor,
    last_tokens_R: torch.Tensor,
    block_tables_RB: torch.Tensor,
    *,
    block_size: int,
    shifts_S: torch.Tensor | None = None,
) -> tuple[list[int], list[int], list[int]]:
    """Returns (token ids, positions, slots)."""
    num_tokens = len(host_token_ids_T)
    token_ids, positions, slots = [-1] * num_tokens, [0] * num_tokens, [-1] * num_tokens
    starts = query_starts.tolist()
    for i, row in enumerate(rows_S.tolist()):
        num_queries = starts[i + 1] - starts[i]
        for query in range(num_queries if row >= 0 else 0):
            token = starts[i] + query
            position = int(context_lens_S[i]) - num_queries + query
            from_host = int(host_token_ids_T[token])
            token_ids[token] = from_host if from_host >= 0 else int(last_tokens_R[row])
            positions[token] = position + (0 if shifts_S is None else int(shifts_S[i]))
            slots[token] = int(block_tables_RB[row, position // block_size]) * block_size + position % block_size
    return token_ids, positions, slots


def remember_tokens(
    last_tokens_R: torch.Tensor, rows_N: torch.Tensor, tokens_ND1: torch.Tensor, counts_N: torch.Tensor
) -> None:
    for n, row in enumerate(rows_N.tolist()):
        if row >= 0:
            last_tokens_R[row] = tokens_ND1[n, int(counts_N[n]) - 1]
