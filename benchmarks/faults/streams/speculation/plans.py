"""Streams that speculation helps, with all features: texts to give back, plain chats, constraints and tools, in turn.
Greedy and sampled, with several choices, penalties, logprobs and stop strings, as crowd.py and structured/ make them.
"""

import sys
from dataclasses import replace

from benchmarks.faults.crowd import Plan, make_plans
from benchmarks.faults.streams.structured.plans import make_structured_plans
from benchmarks.speculation.workloads import workloads

# Who drafts: the schedulers from tokens, or their workers by a draft model and a head.
DRAFTERS = ("scheduler", "workers")


def command(drafters: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "benchmarks.faults.streams.speculation.up", drafters)


def make_speculated_plans(count: int, seed: int, *, mean_tokens: int) -> list[Plan]:
    texts = workloads()["edit"].messages
    plain = make_plans(count, seed, mean_tokens=mean_tokens)
    structured = make_structured_plans(count, seed, max_tokens=2 * mean_tokens)
    found: list[Plan] = []
    for number in range(count):
        # Pairs of one kind, since every second stream samples.
        turn = number // 2 % 3
        if turn == 0:
            text = texts[number % len(texts)]
            found.append(replace(plain[number], kind="edit", prompt=[{"role": "user", "content": text}]))
        else:
            # All kinds of structured streams, and each greedy and sampled.
            other = structured[number // 6 * 2 + number % 2]
            found.append(plain[number] if turn == 1 else replace(other, number=number))
    return found


def without_speculation(plan: Plan) -> Plan:
    """The same stream, without drafts: the reference."""
    return replace(plan, sampling=replace(plan.sampling, num_speculative_tokens=0))
