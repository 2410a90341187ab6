"""Models whose layers carry a state from token to token: outputs are the same to the token, and logprobs to the bit,
whatever happens to a sequence; the scheduler's core, plans, rows, kernels and sampler run in one process.

The state of a sequence is kept in its blocks, so all that finds or moves blocks must find a state that fits its tokens.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from configs.options import Options
from protos.inference_pb2 import SamplingParams
from scheduler.settings import core_settings
from tests.support.models.families import VOCAB_SIZE, make_model
from tests.support.scheduler.generate import Asked, Generated, generate
from worker.cpu.build import build_cpu_runner

LONG = [(7 * i) % 97 + 3 for i in range(60)]
GREEDY, LENGTH = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True), 64
DRAWN = SamplingParams(temperature=1.0, top_p=0.95, seed=3, max_tokens=40, ignore_eos=True, logprobs=1)
REQUESTS = [
    Asked([5, 6, 7], GREEDY),
    # Choices share the prompt's full blocks, and each computes the rest of it.
    Asked(LONG, DRAWN, num_choices=3),
    # Others' prefixes: one that ends with a block, one within a block, one as it is.
    Asked(LONG[:40], GREEDY),
    Asked([*LONG[:37], 90, 91], GREEDY),
    Asked(LONG[:40], GREEDY),
    # A resumed output.
    Asked([50] * 9, SamplingParams(temperature=1.5, seed=8, max_tokens=30, ignore_eos=True), output=[3, 4, 5]),
]


@pytest.fixture(scope="module", params=["mamba2", "qwen3-next"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    path = tmp_path_factory.mktemp("state") / request.param
    return path, make_model(request.param, path)


def run(model: Path, requests: list[Asked] = REQUESTS, lose_at: int = 0, **changes: object) -> Generated:
    fields: dict[str, object] = {
        "model": str(model),
        "dtype": "float32",
        "block_size": 8,
        "num_blocks_override": 120,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "worker_threads": 1,
        "max_model_len": 128,
    }
    options = Options(**(fields | changes))  # type: ignore[arg-type]
    runner = build_cpu_runner(options)
    settings = core_settings(options, runner.model_info, runner.num_swap_blocks)
    return generate(runner, settings, requests, lose_at=lose_at)


@pytest.fixture(scope="module")
def expected(made: tuple[Path, PreTrainedModel]) -> Generated:
    return run(made[0], enable_prefix_caching=False, max_num_batched_tokens=512)


def test_greedy_tokens_are_those_of_transformers(made: tuple[Path, PreTrainedModel], expected: Generated) -> None:
    reference: Any = made[1]
    for request, key in ((REQUESTS[0], (1, 0)), (REQUESTS[2], (3, 0)), (REQUESTS[3], (4, 0))):
        prompt = torch.tensor([request.prompt])
        with torch.inference_mode():
            theirs = reference.generate(prompt, max_new_tokens=LENGTH, do_sample=False, eos_token_id=VOCAB_SIZE)
        assert expected.tokens[key] == theirs[0, len(request.prompt) :].tolist()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_steps_in_flight": 2},
        {"max_num_batched_tokens": 16},
        {"block_size": 64},
        {"block_size": 16, "max_num_batched_tokens": 24, "num_blocks_override": 11},
        {"num_blocks_override": 22},
        {"num_blocks_override": 22, "max_steps_in_flight": 2},
        {"num_blocks_override": 22, "preemption_mode": "swap", "swap_space": 0.01},
        {"num_blocks_override": 22, "preemption_mode": "swap", "swap_space": 0.01, "max_steps_in_flight": 2},
        {"lose_at": 9},
        {"lose_at": 20, "max_steps_in_flight": 2},
    ],
    ids=str,
)
def test_nothing_changes_an_output(made: tuple[Path, PreTrainedModel], expected: Generated, changes: dict) -> None:
    """Also where blocks are shared, taken away, swapped, or lost with the workers."""
    got = run(made[0], **changes)
    assert got.texts == expected.texts
    assert (got.stats.num_preemptions > 0) == ("num_blocks_override" in changes)
    if not changes:
        assert got.stats.num_prefix_hits > 100
