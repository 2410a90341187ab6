"""The requests of a benchmark: random token ids of exact lengths."""

import numpy as np


def random_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """`count` prompts of `length` ids each, drawn evenly from the vocabulary; no two share a prefix worth caching."""
    generator = np.random.default_rng(seed)
    return generator.integers(0, vocab_size, (count, length)).tolist()


def arrival_times(count: int, rate: float, seed: int) -> list[float]:
    """Seconds from the start at which requests arrive: a Poisson process of `rate` per second; inf: all at once."""
    if rate == float("inf"):
        return [0.0] * count
    return np.random.default_rng(seed).exponential(1.0 / rate, count).cumsum().tolist()
