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
class RandomPrompts:
    """Prompts of random tokens, or words. With prefix_len they begin with one of num_prefixes texts of as many tokens,
    each equally likely, as in vLLM's Sonnet dataset, whose prompts share lines of a poem; prompt_len is then that of
    the whole prompt."""

    prompt_len: Lengths
    output_len: Lengths
    prefix_len: int = 0
    num_prefixes: int = 1
    is_drawn: bool = True

    @property
    def name(self) -> str:
        return "prefixes" if self.prefix_len else "random"

    def requests(self, count: int, seed: int, *, vocab_size: int, as_text: bool) -> list[BenchRequest]:
        """Raises DatasetError if a prompt has no token behind its prefix."""
        random = np.random.default_rng(seed)
        prompts, outputs = self.prompt_len(random, count).tolist(), self.output_len(random, count).tolist()
        prefixes: list[Prompt] = []
        chosen = [0] * count
        if self.prefix_len:
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
        found = []
        for prefix, length, output in zip(chosen, prompts, outputs, strict=True):
            prompt = drawn(random, length - self.prefix_len, vocab_size, as_text)
            if prefixes:
                prompt = joined(prefixes[prefix], prompt)
            found.append(BenchRequest(prompt=prompt, prompt_len=length, output_len=output))
        return found


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
