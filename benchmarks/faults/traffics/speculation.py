"""Streams that speculation helps, with all features: texts to give back, plain chats, constraints and tools, in turn.
Greedy and sampled, with several choices, penalties, logprobs and stop strings, as crowd.py and structured.py make them.
The replicas draft in different ways; the undisturbed streams ask for no drafts.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.faults.crowd import Plan, make_plans
from benchmarks.faults.ground import OwnFlags
from benchmarks.faults.traffics.streams import StreamKind
from benchmarks.faults.traffics.structured import FLAGS, breaches, make_structured_plans
from benchmarks.speculation.workloads import workloads

# Layers of the last of two stages.
_KEPT_LAYERS = (18, 24, 29)


def configs_of(drafters: str, directory: Path) -> Sequence[dict[str, Any]]:
    """The speculative_config of each replica. directory: for weights of heads."""
    if drafters == "scheduler":
        return (
            {"method": "ngram", "num_speculative_tokens": 6},
            {"method": "suffix", "num_speculative_tokens": 3},
        )
    # Imports torch, which takes seconds.
    from tests.support.models.smollm2_head import write_smollm2_head

    return (
        {"method": "draft_model", "model": "same", "quantization": "int4", "num_speculative_tokens": 4},
        {
            "method": "eagle3",
            "model": str(write_smollm2_head(directory, kept_layers=_KEPT_LAYERS)),
            "num_speculative_tokens": 3,
        },
    )


def own_flags(drafters: str, directory: Path) -> OwnFlags:
    """The flags of each replica's processes."""
    flags = [["--speculative-config", json.dumps(each)] for each in configs_of(drafters, directory)]
    return {"scheduler": flags, "worker": flags}


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


# Who drafts: the schedulers from tokens, one from n-grams, one from suffixes; or their workers, one by the model itself
# in 4 bits, one by an EAGLE-3 head of random weights.
SCHEDULERS_DRAFT, WORKERS_DRAFT = (
    StreamKind(
        make=lambda count, seed, tokens: make_speculated_plans(count, seed, mean_tokens=tokens),
        flags=FLAGS,
        equip=lambda directory, drafters=drafters: ((), own_flags(drafters, directory)),
        check=breaches,
        reference=without_speculation,
    )
    for drafters in ("scheduler", "workers")
)
