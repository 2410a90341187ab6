"""Wire messages of logprobs of the model's own logits, before temperature, penalties and filters.

Shape suffixes: V vocabulary.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from kernels.sampling import most_likely
from protos import inference_pb2
from runtime.wire import PROMPT_LOGPROBS_FRAME_BYTES

# The most bytes of one TokenLogprob: 19 when it leaves here, the rest for the token's bytes, which the router adds.
_ENTRY_BYTES = 48


def token_logprobs(
    logits_V: np.ndarray, token_id: int, num_top: int, listed: np.ndarray | None = None
) -> inference_pb2.TokenLogprobs:
    """Computes the logprobs of a token and of the num_top most likely ones (ties in order of id), or of listed ones.

    logits_V: float32, finite or -inf; the position's logits before any adjustment.
    """
    largest = logits_V.max()
    log_total = float(largest) + math.log(np.exp(logits_V - largest).sum(dtype=np.float64))
    chosen = logits_V[token_id]
    top_ids = listed
    if top_ids is None:
        top_ids = most_likely(logits_V, num_top) if num_top else np.empty(0, np.int64)
    return logprobs_message(
        token_id,
        float(chosen) - log_total,
        int(np.count_nonzero(logits_V > chosen)) + 1,
        top_ids.tolist(),
        [float(logits_V[top_id]) - log_total for top_id in top_ids.tolist()],
        is_ranked=listed is None,
    )


def logprobs_message(
    token_id: int,
    logprob: float,
    rank: int,
    top_ids: Sequence[int],
    top_logprobs: Sequence[float],
    *,
    is_ranked: bool = True,
) -> inference_pb2.TokenLogprobs:
    """Makes the message of one position. rank: of the chosen token, from 1. top_ids: the most likely first, if
    is_ranked."""
    entry = inference_pb2.TokenLogprob
    return inference_pb2.TokenLogprobs(
        chosen=entry(token_id=token_id, logprob=logprob, rank=rank),
        top=[
            entry(token_id=top_id, logprob=top_logprob, rank=top_rank if is_ranked else 0)
            for top_rank, (top_id, top_logprob) in enumerate(zip(top_ids, top_logprobs, strict=True), 1)
        ],
    )


def frames(first_position: int, logprobs: list[inference_pb2.TokenLogprobs]) -> Iterator[inference_pb2.PromptLogprobs]:
    """Cuts prompt logprobs, from first_position on, into frames within the wire's size limit."""
    largest = max((len(item.top) for item in logprobs), default=0) + 1
    count = max(1, PROMPT_LOGPROBS_FRAME_BYTES // (largest * _ENTRY_BYTES + 8))
    for start in range(0, len(logprobs), count):
        yield inference_pb2.PromptLogprobs(
            first_position=first_position + start, logprobs=logprobs[start : start + count]
        )
