"""The requests of a benchmark: random token ids of exact lengths, or random words."""

import numpy as np


def random_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """`count` prompts of `length` ids each, drawn evenly from the vocabulary; no two share a prefix worth caching."""
    generator = np.random.default_rng(seed)
    return generator.integers(0, vocab_size, (count, length)).tolist()


# Each is one token, with the space before it, in most vocabularies.
_WORDS = (
    "the of and to in for is on that by this with you it not or be are from at as your all have new more was we will "
    "home can us about if page my has search free but our one other do no information time they site he up may what "
    "which their news out use any there see only so his when contact here business who web also now help get view"
)


def random_texts(count: int, length: int, seed: int) -> list[str]:
    """`count` texts of `length` words each, of about as many tokens."""
    random = np.random.default_rng(seed)
    return [random_words(random, length) for _ in range(count)]


def random_words(random: np.random.Generator, length: int) -> str:
    """A text of `length` words."""
    words = _WORDS.split()
    return " ".join(words[index] for index in random.integers(0, len(words), length).tolist())
