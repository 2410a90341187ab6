"""Random settings and requests: small, so that scarce resources run out all the time."""

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from scheduler.core.messages import (
    ChoiceStart,
    CoreSettings,
    GroupRequest,
    RepetitionRule,
    Speculation,
    StepCosts,
    StopRules,
)
from tests.fakes.items import random_items
from tests.fakes.model import VOCAB_SIZE, FakeSampling

EOS = frozenset({0})
MAX_MODEL_LEN = 40
# None, or drafters of all kinds; each may draft as many tokens as its place in this list.
SPECULATIONS = [
    None,
    Speculation(num_speculative_tokens=1, workers_draft=True, workers_catch_up=True),
    Speculation(num_speculative_tokens=2, drafters=("ngram",), prompt_lookup_min=1, prompt_lookup_max=3),
    Speculation(num_speculative_tokens=3, drafters=("ngram", "suffix"), workers_draft=True, max_cached_outputs=2),
]


def random_settings(choose: Random, changes: Mapping[str, object]) -> CoreSettings:
    """Any combination of small numbers that the options allow; `changes` override them."""
    block_size = choose.choice([1, 2, 4, 4])
    is_chunked = choose.random() < 0.8
    num_partial = choose.choice([1, 1, 2, 3]) if is_chunked else 1
    num_stages = choose.choice([1, 1, 2, 3])
    num_swap_blocks = choose.choice([0, 4, 12, 40])
    settings: dict[str, object] = {
        "block_size": block_size,
        "num_blocks": choose.randint(20, 48) // block_size,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": choose.randint(1, 8),
        # Without chunked prefill, longer prompts are refused.
        "max_num_batched_tokens": choose.choice([1, 3, 5, 8, 16, 64] if is_chunked else [8, 16, 40, 64]),
        "eos_token_ids": EOS,
        "enable_prefix_caching": choose.random() < 0.75,
        "scheduling_policy": choose.choice(["fcfs", "fcfs", "priority", "deadline"]),
        "enable_chunked_prefill": is_chunked,
        "long_prefill_token_threshold": choose.choice([0, 0, 2, 5]) if is_chunked else 0,
        "max_num_partial_prefills": num_partial,
        "max_long_partial_prefills": choose.randint(1, num_partial),
        "preemption_mode": choose.choice(["recompute", "swap"]),
        "num_swap_blocks": num_swap_blocks,
        "preemption_policy": "first_chunk" if choose.random() < 0.1 else "whole_context",
        "max_steps_in_flight": choose.choice([1, 1, 2, 3, 4]),
        "num_stages": num_stages,
        "speculation": SPECULATIONS[choose.choice([0, 0, 1, 2, 3])],
        "max_queued_requests": choose.choice([4, 1000, 1000]),
        "max_queued_tokens": choose.choice([60, 100_000, 100_000]),
        "max_finished_timelines": choose.choice([0, 3, 1000]),
    }
    return CoreSettings(**(settings | dict(changes)))  # type: ignore[arg-type]


def step_costs(share: float) -> StepCosts:
    """A step takes so much longer with each token. 0: drafts always pay."""
    return StepCosts(num_tokens=(1, 11), seconds=(1.0, 1.0 + 10 * share), draft_seconds=(share / 4, share / 4))


# Patterns of up to three tokens, twice.
REPETITION = RepetitionRule(min_pattern_size=1, max_pattern_size=3, min_count=2)


@dataclass(frozen=True, slots=True)
class Workload:
    """Sizes and frequencies of request features; drawn once per walk, so that walks differ in kind."""

    most_tokens: int
    most_prompt_tokens: int
    num_prefixes: int
    many_choices: float
    resumed: float
    deadlines: float
    stops: float
    # Drawn without the walk's generator, so that walks without tenants stay as they were.
    tenants: tuple[str, ...] = ("",)
    # Likewise, the share of requests with a constraint.
    constrained: float = 0.0
    # Likewise, the share of requests whose outputs drafters can predict.
    predictable: float = 0.0
    # Likewise, the share of requests with items.
    items: float = 0.0

    @classmethod
    def random(cls, choose: Random) -> "Workload":
        return cls(
            most_tokens=choose.choice([1, 4, 14, 24]),
            most_prompt_tokens=choose.choice([4, 16, 30]),
            num_prefixes=choose.choice([1, 2, 20]),
            many_choices=choose.choice([0.0, 0.2, 0.6]),
            resumed=choose.choice([0.0, 0.1, 0.4]),
            deadlines=choose.choice([0.0, 0.1, 0.5]),
            stops=choose.choice([0.0, 0.5]),
        )

    def request(self, choose: Random, group: int, now: float, settings: CoreSettings) -> GroupRequest:
        salt, tenant = choose.choice(["", "", "", "s"]), Random(group).choice(self.tenants)
        is_constrained = Random(f"constraint {group}").random() < self.constrained
        num_choices = choose.randint(2, 4) if choose.random() < self.many_choices else 1
        prompt, of_items = self._prompt(choose), Random(f"items {group}")
        return GroupRequest(
            group=group,
            request_id=f"request-{group}",
            prompt_token_ids=prompt,
            items=random_items(of_items, len(prompt)) if of_items.random() < self.items else (),
            choices=tuple(
                ChoiceStart(choice=choice, output_token_ids=self._output(choose))
                for choice in sorted(choose.sample(range(5), num_choices))
            ),
            stop=self._stop(choose),
            # KV of one salt must never serve another; without prefix caching, nor KV of one group.
            max_drafts=Random(f"drafts {group}").choice([None, None, 0, 1, 2]),
            sampling=FakeSampling(
                scope=len(salt) if settings.enable_prefix_caching else group,
                seed=choose.randrange(3),
                has_logprobs=choose.random() < 0.1,
                is_constrained=is_constrained,
                is_predictable=Random(f"predictable {group}").random() < self.predictable,
            ),
            bypass_prefix_cache=choose.random() < 0.1,
            priority=choose.randint(-1, 1),
            cache_salt=salt,
            deadline=now + choose.randint(0, 120) / 2 if choose.random() < self.deadlines else None,
            tenant=tenant,
            weight={"a": 0.5, "b": 3.0}.get(tenant, 1.0),
            is_constrained=is_constrained,
        )

    def _prompt(self, choose: Random) -> tuple[int, ...]:
        base, length = choose.randrange(self.num_prefixes), choose.randint(1, self.most_prompt_tokens)
        prompt = [(base * 7 + i) % VOCAB_SIZE for i in range(length)]
        if choose.random() < 0.5:
            prompt[-choose.randint(1, min(6, length)) :] = choose.choices(range(VOCAB_SIZE), k=choose.randint(1, 3))
        return tuple(prompt)

    def _output(self, choose: Random) -> tuple[int, ...]:
        if choose.random() >= self.resumed:
            return ()
        return tuple(choose.choices(range(VOCAB_SIZE), k=choose.randint(1, 6)))

    def _stop(self, choose: Random) -> StopRules:
        max_tokens = choose.randint(1, self.most_tokens)
        has_stops = choose.random() < self.stops
        return StopRules(
            max_tokens=max_tokens,
            min_tokens=choose.choice([0, 0, min(5, max_tokens)]),
            stop_token_ids=frozenset(choose.sample(range(VOCAB_SIZE), choose.randint(0, 2)) if has_stops else ()),
            ignore_eos=not has_stops or choose.random() < 0.5,
            # Tokens repeat by chance.
            repetition=REPETITION if max_tokens % 3 == 0 else None,
        )
