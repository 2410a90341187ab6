"""Logprobs as the wire has them: of the model's own logits, before temperature, penalties and filters.

Shape suffixes: N positions, V vocabulary, K most likely tokens.
"""

from collections.abc import Iterator

import numpy as np
import torch

from protos import inference_pb2
from runtime.wire import PROMPT_LOGPROBS_FRAME_BYTES

# Always as many, so that which of several equally likely tokens make the list does not depend on other rows.
_MAX_TOP = 20
# Bytes of one TokenLogprob at most: 19 as it leaves here, the rest for the token's bytes, which the router adds.
_ENTRY_BYTES = 48


def token_logprobs(
    logits_NV: torch.Tensor, token_ids_N: np.ndarray, num_top_N: np.ndarray
) -> list[inference_pb2.TokenLogprobs]:
    """Of each position's token and of its num_top_N most likely ones.

    logits_NV: float32. token_ids_N: int64. num_top_N: integers, 0 to 20. Equally likely tokens are listed by id.
    """
    logprobs_NV = torch.log_softmax(logits_NV, -1)
    chosen_N1 = logprobs_NV.gather(-1, torch.from_numpy(token_ids_N).unsqueeze(-1))
    ranks_N = ((logprobs_NV > chosen_N1).sum(-1) + 1).tolist()
    if num_top_N.any():
        top_NK, top_ids_NK = (t.numpy() for t in logprobs_NV.topk(min(_MAX_TOP, logits_NV.shape[-1]), -1))
        order_NK = np.lexsort((top_ids_NK, -top_NK))
        top_NK = np.take_along_axis(top_NK, order_NK, -1)
        top_ids_NK = np.take_along_axis(top_ids_NK, order_NK, -1)
    else:
        top_NK = top_ids_NK = np.empty((len(token_ids_N), 0))
    entry = inference_pb2.TokenLogprob
    return [
        inference_pb2.TokenLogprobs(
            chosen=entry(token_id=token, logprob=logprob, rank=rank),
            top=[
                entry(token_id=top_token, logprob=top_logprob, rank=place)
                for place, (top_token, top_logprob) in enumerate(
                    zip(top_ids_K[:num_top].tolist(), top_K[:num_top].tolist(), strict=True), 1
                )
            ],
        )
        for token, logprob, rank, num_top, top_ids_K, top_K in zip(
            token_ids_N.tolist(), chosen_N1[:, 0].tolist(), ranks_N, num_top_N.tolist(), top_ids_NK, top_NK, strict=True
        )
    ]


def frames(first_position: int, logprobs: list[inference_pb2.TokenLogprobs]) -> Iterator[inference_pb2.PromptLogprobs]:
    """Prompt logprobs from first_position on, cut into frames that stay within the wire's bound."""
    largest = max((len(item.top) for item in logprobs), default=0) + 1
    count = max(1, PROMPT_LOGPROBS_FRAME_BYTES // (largest * _ENTRY_BYTES + 8))
    for start in range(0, len(logprobs), count):
        yield inference_pb2.PromptLogprobs(
            first_position=first_position + start, logprobs=logprobs[start : start + count]
        )
