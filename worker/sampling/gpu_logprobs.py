"""Computes logprobs of the model's own logits on the device.

Shape suffixes: Q positions, V vocabulary, K most likely tokens.
"""

from dataclasses import dataclass

import torch

# Positions whose float32 logits exist at once: 64 x 128,256 take 32 MiB, and their sort keys twice that.
SLICE = 64


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Device memory for logprobs, in order of the positions that asked. ranks begin with 1."""

    chosen_Q: torch.Tensor  # float32
    ranks_Q: torch.Tensor  # int32
    top_ids_QK: torch.Tensor  # int32
    top_QK: torch.Tensor  # float32


def write_logprobs(
    logits_QV: torch.Tensor,
    chosen_Q: torch.Tensor,
    into: LogprobTensors,
    first: int,
    listed_QK: torch.Tensor | None = None,
) -> None:
    """Writes for each position the logprob and rank of its chosen token, and the most likely tokens (ties in order of
    id), to the entries from `first` on.

    logits_QV: any float dtype; rows that are not finite give meaningless numbers. chosen_Q: int64. listed_QK: int64,
    tokens to write in the place of the most likely ones; -1: none.
    """
    count, vocab_size = logits_QV.shape
    num_top = into.top_ids_QK.shape[1]
    place = slice(first, first + count)
    # Adding 0 turns -0 into 0: they are equal, but their bits, which the keys below are made of, differ.
    logits_QV = logits_QV.float() + 0.0
    totals_Q1 = logits_QV.logsumexp(1, keepdim=True)
    chosen_Q1 = logits_QV.gather(1, chosen_Q[:, None])
    into.chosen_Q[place] = (chosen_Q1 - totals_Q1)[:, 0]
    into.ranks_Q[place] = (logits_QV > chosen_Q1).sum(1) + 1
    if num_top:
        # Distinct keys, so that topk never has to break a tie: the upper half is the float's bits, made to sort as an
        # integer; the lower half is larger for a lower id.
        bits_QV = logits_QV.view(torch.int32)
        keys_QV = (bits_QV ^ ((bits_QV >> 31) & 0x7FFFFFFF)).long()
        keys_QV <<= 32
        keys_QV += torch.arange(vocab_size - 1, -1, -1, device=logits_QV.device)
        top_keys_QK = keys_QV.topk(num_top, dim=1).values
        top_ids_QK = vocab_size - 1 - (top_keys_QK & 0xFFFFFFFF)
        if listed_QK is not None:
            top_ids_QK = torch.where(listed_QK >= 0, listed_QK, top_ids_QK)
        into.top_ids_QK[place] = top_ids_QK
        into.top_QK[place] = logits_QV.gather(1, top_ids_QK) - totals_Q1
