"""Streams of many sorts, fixed by a seed: greedy and sampled, with stop strings, logprobs, penalties, n of 2."""

import random
from dataclasses import dataclass, replace

from octavo import SamplingParams
from octavo.requests import Prompt

_SUBJECTS = ("the number", "room", "the year", "bus line", "page", "the planet of star", "house", "train")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One stream. number: its place among all."""

    number: int
    prompt: Prompt
    sampling: SamplingParams

    @property
    def num_tokens(self) -> int:
        """At most, of all choices together."""
        return self.sampling.n * (self.sampling.max_tokens or 0)

    @property
    def has_seed(self) -> bool:
        """Whether it says the same whenever it is asked."""
        return self.sampling.temperature == 0 or self.sampling.seed is not None

    def seeded(self, seed: int) -> "Plan":
        return replace(self, sampling=replace(self.sampling, seed=seed))


def make_plans(count: int, seed: int, *, mean_tokens: int) -> list[Plan]:
    """Every second one is sampled, half of these without a seed of the client's. mean_tokens: of one choice."""
    choose = random.Random(f"{seed}/plans")
    return [_make_plan(number, choose, mean_tokens) for number in range(count)]


def _make_plan(number: int, choose: random.Random, mean_tokens: int) -> Plan:
    text = f"Tell me, in a few sentences, about {choose.choice(_SUBJECTS)} {choose.randrange(1000)}."
    prompt: Prompt = [{"role": "user", "content": text}]
    if number % 5 == 4:
        prompt = text
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=choose.randint(mean_tokens // 2, mean_tokens * 3 // 2),
        # Few would get far otherwise.
        ignore_eos=number % 8 != 6,
        stop=["\n\n", " 1"] if number % 15 == 4 else (),
        logprobs=2 if number % 12 in (0, 5) else None,
        prompt_logprobs=1 if number % 25 == 9 else None,
        repetition_penalty=1.1 if number % 9 == 8 else None,
        frequency_penalty=0.3 if number % 9 == 8 else 0.0,
    )
    if number % 2:
        sampling = replace(
            sampling,
            temperature=choose.choice([0.6, 0.8, 1.0]),
            top_p=choose.choice([0.9, 1.0]),
            top_k=choose.choice([0, 40]),
            seed=choose.randrange(2**32) if number % 4 == 1 else None,
            n=2 if number % 10 == 7 else 1,
        )
    return Plan(number=number, prompt=prompt, sampling=sampling)
