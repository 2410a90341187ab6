"""Results as they should not be."""

import numpy as np

from scheduler.messages import Result

# A sequence number that no core reaches.
NOBODY = 2**40


def without(result: Result, index: int) -> Result:
    """The result as it would be had the workers forgotten one of its sequences."""
    counts = np.ones(len(result.sequences), np.int32) if result.num_tokens is None else result.num_tokens
    start = int(counts[:index].sum())
    kept = np.delete(counts, index)
    return Result(
        step=result.step,
        sequences=np.delete(result.sequences, index),
        positions=np.delete(result.positions, index),
        num_tokens=None if result.num_tokens is None else kept,
        token_ids=np.delete(result.token_ids, slice(start, start + int(counts[index]))),
        logprobs=result.logprobs,
        drafts=result.drafts,
        failed=result.failed,
    )


def with_strays(result: Result) -> Result:
    """The result with entries before and behind the others that name nobody, or a position that is not the next."""
    sequences = [NOBODY, *result.sequences.tolist(), NOBODY + 1]
    positions = [0, *result.positions.tolist(), 7]
    counts = [1] * len(result.sequences) if result.num_tokens is None else result.num_tokens.tolist()
    return Result(
        step=result.step,
        sequences=np.array(sequences, np.int64),
        positions=np.array(positions, np.int32),
        num_tokens=None if result.num_tokens is None else np.array([1, *counts, 1], np.int32),
        token_ids=np.array([1, *result.token_ids.tolist(), 1], np.int32),
        logprobs=result.logprobs,
        drafts=result.drafts,
        failed=result.failed | {NOBODY + 2},
    )
