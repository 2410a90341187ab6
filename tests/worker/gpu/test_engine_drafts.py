"""The GPU's engine with drafts, and logprobs of the sampled tokens under the model's own logits."""

import numpy as np
import pytest

from protos.inference_pb2 import SamplingParams, TokenLogprobs
from tests.fakes.fake_model import POISON, logits_after
from tests.support.gpu.gpu_engine import EngineRun, outputs_alone
from worker.sampling.logprobs import token_logprobs
from worker.step.inputs import Logprobs, PromptScores

GREEDY = SamplingParams(temperature=0.0)
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]
KINDS = {
    "greedy": GREEDY,
    "drawn": SamplingParams(temperature=1.0, seed=11),
    # At each position, the drafts before it count as output.
    "penalised": SamplingParams(
        temperature=0.0, presence_penalty=1.0, frequency_penalty=0.9, logit_bias={30: 7, 31: 6, 2: 9}, min_tokens=4
    ),
}


def expected_logprobs(tokens: list[int], chosen: int, num_top: int) -> TokenLogprobs:
    return token_logprobs(logits_after(tokens).numpy(), chosen, num_top)


def check(logprobs: Logprobs, index: int, expected: TokenLogprobs) -> None:
    """Both are float32 sums, added in different orders."""
    assert logprobs.chosen[index] == pytest.approx(expected.chosen.logprob, abs=1e-5)
    assert logprobs.ranks[index] == expected.chosen.rank
    assert logprobs.top_ids_K[index, : len(expected.top)].tolist() == [entry.token_id for entry in expected.top]
    got = logprobs.top_K[index, : len(expected.top)].tolist()
    assert got == pytest.approx([entry.logprob for entry in expected.top], abs=1e-5)


@pytest.mark.parametrize("wrong_at", [0, 2, None])
def test_output_is_that_without_drafts(wrong_at: int | None) -> None:
    """Rows of every kind in one batch, with three drafts, one, or none; drafts before wrong_at are right."""
    alone = {kind: outputs_alone(PROMPT, params, 16) for kind, params in KINDS.items()}
    run = EngineRun()
    rows = {4: "drawn", 1: "penalised", 0: "greedy", 2: "penalised"}
    num_drafts = {4: 3, 1: 3, 0: 1, 2: 0}
    for row, kind in rows.items():
        run.add(row, PROMPT, KINDS[kind])
    run.step(dict.fromkeys(rows, 11))
    for _ in range(3):
        drafts = {}
        for row, kind in rows.items():
            known = len(run.rows[row].output)
            drafts[row] = alone[kind][known : known + num_drafts[row]]
            if wrong_at is not None and wrong_at < len(drafts[row]):
                drafts[row][wrong_at] = (drafts[row][wrong_at] + 1) % 90
        outputs = run.step(dict.fromkeys(rows, 1), drafts=drafts)
        right = {row: num_drafts[row] if wrong_at is None else min(wrong_at, num_drafts[row]) for row in rows}
        assert outputs.counts_N.tolist() == [right[row] + 1 for row in rows]
    # Then a step without drafts: rejected drafts have left nothing behind.
    run.step(dict.fromkeys(rows, 1))
    for row, kind in rows.items():
        assert run.rows[row].output == alone[kind][: len(run.rows[row].output)], kind


def test_more_positions_than_logits_exist_at_once() -> None:
    """Two rows with 40 drafts each, with memory for the logits of 64 positions."""
    run = EngineRun(max_num_seqs=2, max_num_batched_tokens=100, max_model_len=256)
    # The fake model fails a row that has POISON in its context.
    params = SamplingParams(temperature=0.0, logprobs=1, logit_bias={POISON: -100.0})
    expected = outputs_alone(PROMPT, params, 42)
    for row in (0, 1):
        run.add(row, PROMPT, params)
    run.step({0: 11, 1: 11})
    outputs = run.step({1: 1, 0: 1}, drafts={1: expected[1:41], 0: expected[1:41]})
    assert run.rows[0].output == run.rows[1].output == expected
    assert outputs.logprobs is not None
    assert outputs.logprobs.positions.tolist() == list(range(82))
    for position in (0, 40, 41, 63, 64, 81):
        known = [*PROMPT, *expected[: 1 + position % 41]]
        check(outputs.logprobs, position, expected_logprobs(known, expected[1 + position % 41], 1))


def test_logprobs_are_of_the_model_s_own_logits() -> None:
    """Rows that want different numbers of logprobs, one with adjusted logits, beside a row that wants none."""
    run = EngineRun()
    asked = {3: 0, 0: 4, 5: 2}
    run.add(3, PROMPT, SamplingParams(temperature=0.0, logprobs=0))
    run.add(0, PROMPT[:5], SamplingParams(temperature=1.0, seed=5, logprobs=4))
    run.add(2, PROMPT[:3], GREEDY)
    run.add(5, PROMPT[:7], SamplingParams(temperature=0.0, logit_bias={40: 100.0}, presence_penalty=1.0, logprobs=2))
    order = {3: 11, 2: 3, 0: 5, 5: 7}
    # A step of prompts, then steps that only decode.
    for counts in (order, dict.fromkeys(order, 1), dict.fromkeys(order, 1)):
        outputs = run.step(counts)
        assert outputs.logprobs is not None
        assert outputs.logprobs.positions.tolist() == [0, 2, 3]
        assert outputs.logprobs.top_ids_K.shape == (3, 4)
        for index, (row, num_top) in enumerate(asked.items()):
            *before, chosen = run.rows[row].tokens
            check(outputs.logprobs, index, expected_logprobs(before, chosen, num_top))
    assert run.rows[5].output == [40, 40, 40]


def test_nobody_asked() -> None:
    run = EngineRun()
    run.add(0, PROMPT, GREEDY)
    outputs = run.step({0: 11})
    assert outputs.logprobs is None
    assert outputs.prompt_logprobs is None


def test_prompts_are_scored_in_slices() -> None:
    """More positions than there is room for logits, from the middle of a step, beside a row that decodes."""
    prompt = np.random.default_rng(0).integers(3, 90, 80).tolist()
    run = EngineRun(max_num_seqs=2, max_num_batched_tokens=100)
    run.add(1, PROMPT, GREEDY)
    run.step({1: 11})
    run.add(0, prompt, SamplingParams(temperature=0.0, logprobs=1))
    # All but the last token, which the first output token follows.
    scores = PromptScores(
        tokens_P=np.arange(1, 80, dtype=np.int32), targets_P=np.array(prompt[1:], np.int32), num_top=2
    )
    outputs = run.step({1: 1, 0: 80}, prompt_scores=scores)
    assert outputs.prompt_logprobs is not None
    assert outputs.prompt_logprobs.positions.tolist() == list(range(79))
    for position in (0, 1, 62, 63, 64, 78):
        expected = expected_logprobs(prompt[: position + 1], prompt[position + 1], 2)
        check(outputs.prompt_logprobs, position, expected)
    assert run.rows[0].output == outputs_alone(prompt, GREEDY, 1)
    assert run.rows[1].output == outputs_alone(PROMPT, GREEDY, 2)
    assert outputs.logprobs is not None
    check(outputs.logprobs, 0, expected_logprobs(prompt, run.rows[0].output[0], 1))
