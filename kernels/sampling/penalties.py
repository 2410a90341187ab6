"""Adjustments of one row's logits before temperature, in place. V: vocabulary, N: tokens named."""

import numpy as np

_LARGEST = np.finfo(np.float32).max


def apply_penalties(
    logits_V: np.ndarray,
    token_ids_N: np.ndarray,
    output_counts_N: np.ndarray,
    *,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
) -> None:
    """Makes tokens that occurred less likely.

    logits_V: float32, changed in place. token_ids_N: distinct ids that occur in prompt or output. output_counts_N: how
    often each occurs in the output (0: in the prompt alone). repetition: above 0; divides positive logits and
    multiplies negative ones, for prompt and output (Keskar et al., CTRL, 2019). presence, frequency: subtracted once,
    and once for each occurrence, for output tokens (OpenAI's definition).
    """
    logits_N = logits_V[token_ids_N]
    if repetition != 1.0:
        with np.errstate(over="ignore"):
            logits_N = np.where(logits_N > 0, logits_N / np.float32(repetition), logits_N * np.float32(repetition))
        # A tiny penalty may overflow; infinity would make the row unusable.
        logits_N = np.clip(logits_N, -_LARGEST, _LARGEST)
    logits_N = logits_N - np.float32(frequency) * output_counts_N.astype(np.float32)
    logits_N -= np.float32(presence) * (output_counts_N > 0)
    logits_V[token_ids_N] = logits_N


def apply_logit_bias(logits_V: np.ndarray, token_ids_N: np.ndarray, bias_N: np.ndarray) -> None:
    """Adds bias_N (float32) to the logits of distinct token_ids_N."""
    logits_V[token_ids_N] += bias_N
