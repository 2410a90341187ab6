"""Speculative decoding of SmolLM2 by the scheduler's drafters and by the model itself in fewer bits: the same tokens,
greedy, sampled and under a constraint, in fewer steps."""

import pytest

from octavo import Constraint, SamplingParams
from octavo.local.llm import LLM
from tests.support.local import CHATS, engine_of
from tests.support.scheduler.costs import make_drafts_free

SCHEMA = {
    "type": "object",
    "properties": {"summary": {"type": "string"}, "lines": {"type": "integer"}},
    "required": ["summary", "lines"],
}
SAMPLINGS = [
    SamplingParams(temperature=0.0, max_tokens=80),
    SamplingParams(temperature=0.8, seed=1, max_tokens=30, constraint=Constraint(json=SCHEMA)),
    SamplingParams(temperature=0.7, top_p=0.9, n=2, seed=5, max_tokens=60, repetition_penalty=1.05),
]


def outputs_of(llm: LLM) -> list[list[tuple[int, ...]]]:
    return [
        [tuple(choice.token_ids) for choice in each.choices]
        for sampling in SAMPLINGS
        for each in llm.generate(CHATS, sampling)
    ]


@pytest.fixture(scope="module")
def expected() -> list[list[tuple[int, ...]]]:
    return outputs_of(LLM(dtype="float32", worker_threads=2))


@pytest.mark.parametrize(
    "config",
    [
        {"method": "ngram"},
        {"method": "suffix"},
        {"method": "draft_model", "model": "same", "quantization": "int4"},
    ],
    ids=lambda config: "-".join(config.values()),
)
def test_outputs_are_the_same_and_drafts_are_accepted(
    config: dict[str, str], expected: list[list[tuple[int, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_drafts_free(monkeypatch)
    llm = LLM(dtype="float32", worker_threads=2, speculative_config=config)
    assert outputs_of(llm) == expected
    stats = engine_of(llm)._core.stats
    assert 20 < stats.num_accepted_tokens <= stats.num_draft_tokens
    # Forced tokens are not counted by position.
    assert 20 < sum(stats.num_accepted_by_position) <= stats.num_accepted_tokens
