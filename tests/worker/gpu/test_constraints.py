"""Constraints on a GPU's runner and engine: the same outputs as on a CPU, with each sequence in one step at a time."""

from typing import Any

import pytest

from protos import inference_pb2, step_pb2
from protos.inference_pb2 import SamplingParams, TokenIds
from scheduler.core.messages import FinishReason
from tests.fakes.fake_model import POISON, VOCAB_SIZE
from tests.fakes.fake_runner import fake_runner
from tests.fakes.gpu.gpu_model import FakeGpuModel, fake_kv_cache
from tests.support.gpu.gpu import gpu_device
from tests.support.masked_rows import EOS, LONG, PLAIN, TEXTS, THINKING, settings
from tests.support.scheduler.generate import Asked, Generated, generate
from tests.support.text_choices import FEW_TOKENS, choice, texts_grammars
from worker.errors import PlanError
from worker.gpu.engine import GpuEngine
from worker.gpu.runner import GpuRunner
from worker.gpu.swap import GpuSwapSpace
from worker.step import masks
from worker.step.rows import Rows

REQUESTS = [
    Asked([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=40, constraint=TEXTS, logprobs=2)),
    Asked([8, 9], SamplingParams(temperature=1.5, seed=4, max_tokens=40, constraint=TEXTS), num_choices=2),
    Asked([5, 6], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logit_bias={POISON: -100.0})),
    Asked([3] * 9, SamplingParams(temperature=1.0, seed=2, max_tokens=20, constraint=LONG, logprobs=1)),
    Asked([9], SamplingParams(temperature=0.0, max_tokens=40, constraint=TEXTS), output=[42, 26, 30]),
    Asked([8, 9], SamplingParams(temperature=1.0, seed=4, **THINKING, **PLAIN), num_choices=2),
    Asked(
        [5],
        SamplingParams(
            temperature=0.0, max_tokens=9, constraint=choice("abcde"), bad_word_token_ids=[TokenIds(ids=[13])]
        ),
    ),
]


def gpu_runner(max_steps_in_flight: int) -> GpuRunner:
    device, kv_cache = gpu_device(), fake_kv_cache(num_blocks=65)
    sizes: dict[str, Any] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 128,
        "vocab_size": VOCAB_SIZE,
    }
    engine = GpuEngine(FakeGpuModel(), kv_cache, device, max_steps_in_flight=max_steps_in_flight, **sizes)
    rows = Rows(
        **sizes, block_size=8, num_blocks=64, eos_token_ids=frozenset({EOS}), grammars=texts_grammars(EOS, FEW_TOKENS)
    )
    return GpuRunner(
        engine,
        rows,
        inference_pb2.ModelInfo(name="fake"),
        swap_space=GpuSwapSpace(kv_cache, device, 0),
        max_steps_in_flight=max_steps_in_flight,
    )


@pytest.fixture(scope="module")
def expected() -> Generated:
    """On a CPU, without forced tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks, "MAX_FORCED_TOKENS", 0)
        return generate(fake_runner(grammars=texts_grammars(EOS, FEW_TOKENS)), settings(), REQUESTS)


@pytest.mark.parametrize("forced", [0, 16])
def test_outputs_are_those_of_a_cpu(expected: Generated, forced: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "MAX_FORCED_TOKENS", forced)
    made = generate(gpu_runner(3), settings(3), REQUESTS, lose_at=6 if forced else 0)
    assert made.texts == expected.texts
    assert made.texts[-1][1] is FinishReason.ERROR
    assert (made.stats.num_accepted_tokens > 10) == bool(forced)
    for key, count in made.most_in_flight.items():
        assert count == (3 if key == (3, 0) else 1), "held though it has no constraint, or not held"
    ids = {key: [entry.chosen.token_id for entry in found] for key, found in made.logprobs.items()}  # type: ignore[attr-defined]
    assert all(found == made.tokens[key] for key, found in ids.items() if found)


def test_a_constrained_row_that_is_planned_before_its_result_is_refused() -> None:
    runner = gpu_runner(2)
    new = step_pb2.NewRow(
        row=1, sequence=7, token_ids=[5, 6], num_prompt_tokens=2, block_ids=[1], sampling=REQUESTS[0].sampling
    )
    step = runner.begin(step_pb2.StepPlan(step=1, new_rows=[new], rows=[1], num_tokens=[2]))
    again = step_pb2.StepPlan(step=2, decode_rows=b"\x01\x00")
    with pytest.raises(PlanError, match="samples under a constraint"):
        runner.begin(again)
    step.result()
