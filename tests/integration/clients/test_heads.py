"""An EAGLE-3 head over SmolLM2, which shares its embeddings: its random drafts change no output, greedy or sampled."""

from pathlib import Path

import pytest

from octavo import SamplingParams
from octavo.local.llm import LLM
from tests.support.local import CHATS, engine_of
from tests.support.models.smollm2_head import write_smollm2_head
from tests.support.scheduler.costs import make_drafts_free

SAMPLINGS = [
    SamplingParams(temperature=0.0, max_tokens=12),
    SamplingParams(temperature=0.7, top_p=0.9, n=2, seed=5, max_tokens=12, repetition_penalty=1.05),
]


def outputs_of(llm: LLM) -> list[tuple[int, ...]]:
    return [
        tuple(choice.token_ids)
        for sampling in SAMPLINGS
        for each in llm.generate(CHATS[1:], sampling)
        for choice in each.choices
    ]


def test_outputs_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_drafts_free(monkeypatch)
    config = {"method": "eagle3", "model": str(write_smollm2_head(tmp_path)), "num_speculative_tokens": 3}
    llm = LLM(worker_threads=2, speculative_config=config)
    assert outputs_of(llm) == outputs_of(LLM(worker_threads=2))
    assert engine_of(llm)._core.stats.num_draft_tokens > 0
