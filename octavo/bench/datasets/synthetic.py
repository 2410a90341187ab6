"""Requests drawn at random: of given lengths, and behind prefixes that several of them share."""

from dataclasses import dataclass

import numpy as np

from octavo.bench.backends.base import Prompt
from octavo.bench.datasets.request import BenchRequest, DatasetError
from octavo.bench.workload import random_words
from octavo.plan.workload import Lengths

# Prefixes are drawn with seeds of their own, so that they stay the same whatever the number of requests.
_PREFIX_SEED = 1_000_003


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomLengths:
    """Prompts of random tokens, or words, without a common beginning."""

    prompt_len: Lengths
    output_len: Lengths
    name: str = "random"
    is_drawn: bool = True

    def requests(self, count: int, seed: int, *, vocab_size: int, as_text: bool) -> list[BenchRequest]:
        random = np.random.default_rng(seed)
        prompts, outputs = self.prompt_len(random, count).tolist(), self.output_len(random, count).tolist()
        return [
            BenchRequest(prompt=drawn(random, length, vocab_size, as_text), prompt_len=length, output_len=output)
            for length, output in zip(prompts, outputs, strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixes:
    """Prompts that begin with one of num_prefixes texts of prefix_len tokens, each equally likely, and go on at random.

    As vLLM's Sonnet dataset, whose prompts share lines of a poem. prompt_len: of the whole prompt.
    """

    prompt_len: Lengths
    output_len: Lengths
    prefix_len: int
    num_prefixes: int
    name: str = "prefixes"
    is_drawn: bool = True

    def requests(self, count: int, seed: int, *, vocab_size: int, as_text: bool) -> list[BenchRequest]:
        """Raises DatasetError if a prompt has no token behind its prefix."""
        random = np.random.default_rng(seed)
        prompts, outputs = self.prompt_len(random, count).tolist(), self.output_len(random, count).tolist()
        if min(prompts) <= self.prefix_len:
            raise DatasetError(
                f"--prefix-len={self.prefix_len} leaves no token for a prompt of {min(prompts)}: give less, or a "
                "larger --prompt-len, which is the length of the whole prompt"
            )
        prefixes = [
            drawn(np.random.default_rng((seed, _PREFIX_SEED, number)), self.prefix_len, vocab_size, as_text)
            for number in range(self.num_prefixes)
        ]
        chosen = random.integers(0, self.num_prefixes, count).tolist()
        return [
            BenchRequest(
                prompt=joined(prefixes[prefix], drawn(random, length - self.prefix_len, vocab_size, as_text)),
                prompt_len=length,
                output_len=output,
            )
            for prefix, length, output in zip(chosen, prompts, outputs, strict=True)
        ]


def drawn(random: np.random.Generator, length: int, vocab_size: int, as_text: bool) -> Prompt:
    """Returns `length` random token ids, or as many words."""
    return random_words(random, length) if as_text else random.integers(0, vocab_size, length).tolist()


def joined(first: Prompt, second: Prompt) -> Prompt:
    """Joins two prompts of one kind."""
    if isinstance(first, str):
        assert isinstance(second, str)
        return f"{first} {second}"
    assert not isinstance(second, str)
    return first + second
