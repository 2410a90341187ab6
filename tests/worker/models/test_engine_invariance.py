"""Tokens and logprobs of a bfloat16 engine, quantized or not, are the same to the bit whatever happens to a request.

Scheduling core, plan encoding, rows, kernels and sampler run in one process. test_exactness.py compares float32 tokens
with another engine's; here logprobs are compared, too, which show a changed bit of the logits.
"""

from collections.abc import Sequence
from typing import Any, Literal

import pytest
import torch

from octavo import SamplingParams
from octavo.client.results import Choice
from octavo.local.llm import LLM

NUM_TOKENS = 20
Quantization = Literal["none", "int8", "int4"]


def _sampling(index: int) -> SamplingParams:
    """Greedy with and without logprobs, which take different paths, and choices that are drawn."""
    always = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": index}
    if index % 3 == 2:
        return SamplingParams(**always, temperature=0.9, top_p=0.95, top_k=50, n=3, logprobs=2)
    return SamplingParams(**always, temperature=0.0, logprobs=(None, 2)[index % 3])


def _prompts() -> list[list[int]]:
    """Prompts of mixed length; the later ones share a prefix."""
    generator = torch.Generator().manual_seed(11)

    def words(count: int) -> list[int]:
        return torch.randint(100, 40_000, (count,), generator=generator).tolist()

    shared = words(48)
    return [words(count) for count in (1, 17, 64, 150)] + [shared + words(count) for count in (1, 16, 33, 40, 90)]


PROMPTS = _prompts()
SAMPLING = [_sampling(index) for index in range(len(PROMPTS))]


@pytest.fixture(scope="module", params=["none", "int8", "int4"])
def quantization(request: pytest.FixtureRequest) -> Quantization:
    return request.param


def _llm(quantization: Quantization, **options: Any) -> LLM:
    """With int8 weights the KV cache is in e4m3."""
    kv_cache_dtype = "fp8" if quantization == "int8" else "auto"
    return LLM(dtype="bfloat16", quantization=quantization, kv_cache_dtype=kv_cache_dtype, worker_threads=2, **options)


def _generate(llm: LLM, indices: Sequence[int]) -> list[tuple[Choice, ...]]:
    """Each request's choices: token ids and logprobs."""
    results = llm.generate([PROMPTS[index] for index in indices], [SAMPLING[index] for index in indices])
    return [result.choices for result in results]


@pytest.fixture(scope="module")
def alone(quantization: Quantization) -> list[tuple[Choice, ...]]:
    """Each request by itself, in an engine that keeps nothing of earlier ones."""
    llm = _llm(quantization, enable_prefix_caching=False)
    return [_generate(llm, [index])[0] for index in range(len(PROMPTS))]


def test_what_is_compared_would_show_a_change(alone: list[tuple[Choice, ...]]) -> None:
    assert all(len(choice.token_ids) == NUM_TOKENS for choices in alone for choice in choices)
    assert all(len(choice.logprobs) == NUM_TOKENS for choice in alone[1])
    first, second, third = alone[2]
    assert first.token_ids != second.token_ids != third.token_ids, "choices of one request must differ"


def test_a_crowd_and_prefix_hits_change_nothing(quantization: Quantization, alone: list[tuple[Choice, ...]]) -> None:
    llm = _llm(quantization)
    everyone = range(len(PROMPTS))
    assert _generate(llm, everyone) == alone
    again = llm.generate(PROMPTS, SAMPLING)
    assert [result.choices for result in again] == alone
    num_cached = sum(result.usage.cached_tokens for result in again if result.usage)
    assert num_cached > 400, "the second run of equal prompts found nothing cached"


def test_small_chunks_and_steps_ahead_change_nothing(
    quantization: Quantization, alone: list[tuple[Choice, ...]]
) -> None:
    llm = _llm(quantization, max_num_batched_tokens=32, block_size=8, max_steps_in_flight=2)
    # The order differs, too, so that each request has other neighbours.
    order = range(len(PROMPTS) - 1, -1, -1)
    assert _generate(llm, order) == [alone[index] for index in order]


@pytest.mark.parametrize("mode", [{"preemption_mode": "recompute"}, {"preemption_mode": "swap", "swap_space": 0.05}])
def test_preemptions_change_nothing(quantization: Quantization, alone: list[tuple[Choice, ...]], mode: dict) -> None:
    llm = _llm(quantization, num_blocks_override=26, block_size=8, max_steps_in_flight=2, **mode)
    assert _generate(llm, range(len(PROMPTS))) == alone
    assert llm.num_preemptions >= 3
