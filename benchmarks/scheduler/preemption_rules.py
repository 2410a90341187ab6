"""Compares our preemption rule with vLLM's, on the same 300 requests, in a quarter of the blocks that they need.

    python -m benchmarks.scheduler.preemption_rules [--json] [--seed 0]

The workers are fakes: the next token is a function of the tokens before it, and each KV slot remembers what it was
written for, so that wrong KV changes the output. Prints a line for each of: a pool that holds everything; whole_context
(ours) and first_chunk (vLLM V1's) with a quarter of it, by recompute and by swap: {rule, mode, blocks, requests, equal,
preemptions, steps, computed_tokens}. Exits 1 if an output differs from that without preemption, a request does not end,
or our rule does not preempt less often.
"""

import argparse
import random
import sys
from collections import Counter

from benchmarks.command import show
from scheduler.core.core import Core
from scheduler.core.messages import ChoiceStart, CoreSettings, FinishReason, GroupRequest, SequenceKey, StopRules
from tests.fakes.model import FakeSampling
from tests.fakes.plan_worker import PlanWorker

NUM_REQUESTS, BLOCK_SIZE, MAX_MODEL_LEN, MAX_NUM_SEQS = 300, 16, 2048, 64
MOST_STEPS = 200_000


def make_requests(seed: int) -> list[tuple[int, GroupRequest]]:
    """Makes pairs (step at which the request comes, request), in order."""
    choose = random.Random(seed)
    requests, step = [], 0
    for group in range(1, NUM_REQUESTS + 1):
        step += choose.randint(0, 3)
        request = GroupRequest(
            group=group,
            request_id=str(group),
            prompt_token_ids=tuple(choose.randrange(30_000) for _ in range(choose.randint(20, 600))),
            choices=(ChoiceStart(choice=0),),
            stop=StopRules(max_tokens=choose.randint(20, 400), ignore_eos=True),
            sampling=FakeSampling(seed=group),
        )
        requests.append((step, request))
    return requests


def blocks_needed(requests: list[tuple[int, GroupRequest]]) -> int:
    """Blocks of the MAX_NUM_SEQS largest requests, which may run together."""
    sizes = sorted(len(request.prompt_token_ids) + request.stop.max_tokens for _, request in requests)
    return sum(-(-size // BLOCK_SIZE) for size in sizes[-MAX_NUM_SEQS:])


def run(
    requests: list[tuple[int, GroupRequest]], num_blocks: int, *, rule: str, mode: str
) -> tuple[dict[SequenceKey, tuple[int, ...]], dict[str, object]]:
    """Runs the requests; returns their outputs, and figures."""
    num_swap_blocks = num_blocks if mode == "swap" else 0
    core = Core(
        CoreSettings(
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=512,
            preemption_policy=rule,
            preemption_mode=mode,
            num_swap_blocks=num_swap_blocks,
        )
    )
    worker = PlanWorker(
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        num_swap_blocks=num_swap_blocks,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=512,
    )
    outputs: dict[SequenceKey, list[int]] = {(request.group, 0): [] for _, request in requests}
    ends: Counter[FinishReason] = Counter()
    coming = list(reversed(requests))
    steps = computed = 0
    while coming or core.has_work:
        while coming and coming[-1][0] <= steps:
            rejection = core.submit(coming.pop()[1], 0.0)
            assert rejection is None, rejection
        steps += 1
        assert steps < MOST_STEPS, "the requests do not end"
        plan = core.schedule(0.0)
        if plan is None:
            continue
        computed += plan.num_tokens
        said = core.apply(worker.run(plan), 0.0)
        for group, token_id in zip(said.groups.tolist(), said.token_ids.tolist(), strict=True):
            outputs[group, 0].append(token_id)
        ends.update(end.reason for end in said.ends)
    core.check_integrity()
    assert ends == {FinishReason.LENGTH: len(requests)}, ends
    figures: dict[str, object] = {
        "rule": rule,
        "mode": mode,
        "blocks": num_blocks,
        "requests": len(requests),
        "steps": steps,
        "computed_tokens": computed,
        "preemptions": core.stats.num_preemptions,
    }
    return {key: tuple(token_ids) for key, token_ids in outputs.items()}, figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    requests = make_requests(arguments.seed)
    needed = blocks_needed(requests)
    expected, figures = run(requests, needed, rule="whole_context", mode="recompute")
    assert figures["preemptions"] == 0
    show(figures, as_json=arguments.json)
    is_good = True
    for mode in ("recompute", "swap"):
        preemptions = {}
        for rule in ("whole_context", "first_chunk"):
            outputs, figures = run(requests, needed // 4, rule=rule, mode=mode)
            equal = sum(outputs[key] == tokens for key, tokens in expected.items())
            preemptions[rule] = figures["preemptions"]
            show(figures | {"equal": equal}, as_json=arguments.json)
            is_good &= equal == len(requests)
        is_good &= preemptions["whole_context"] < preemptions["first_chunk"]
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
