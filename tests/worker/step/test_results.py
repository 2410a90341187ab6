"""Drafts: whatever is guessed, a row's output is the same as without drafts. The model is a hash of its context."""

import pytest

from protos import step_pb2
from protos.inference_pb2 import SamplingParams
from tests.fakes.fake_model import POISON
from tests.fakes.fake_runner import fake_runner
from tests.support.scheduler.steps import Said, decodes, drafting, said
from worker.cpu.runner import Runner

PROMPT = [5, 6, 7, 8, 9, 10, 11]
KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=1.0, top_p=0.9, seed=4),
    # Each token changes the logits of the next one.
    "penalties": SamplingParams(
        temperature=1.0,
        seed=4,
        repetition_penalty=1.7,
        presence_penalty=1.0,
        frequency_penalty=2.0,
        logit_bias={POISON: -100.0},
    ),
    "min_tokens": SamplingParams(temperature=2.0, seed=8, min_tokens=9, logit_bias={2: 9.0, POISON: -100.0}),
}


def start(sampling: SamplingParams, prompt: list[int] = PROMPT) -> tuple[Runner, list[int]]:
    """A runner whose row 0 has computed its prompt, and the row's first token."""
    runner = fake_runner()
    new = step_pb2.NewRow(
        sequence=7, token_ids=prompt, num_prompt_tokens=len(prompt), block_ids=range(1, 6), sampling=sampling, choice=1
    )
    result = runner.execute(step_pb2.StepPlan(new_rows=[new], rows=[0], num_tokens=[len(prompt)]))
    return runner, said(result).token_ids


def step(runner: Runner, drafts: list[int]) -> Said:
    if not drafts:
        return said(runner.execute(step_pb2.StepPlan(decode_rows=decodes(0))))
    plan = step_pb2.StepPlan(**drafting({0: drafts}))
    return said(runner.execute(plan))


def without_drafts(sampling: SamplingParams, count: int) -> list[int]:
    runner, tokens = start(sampling)
    while len(tokens) < count:
        tokens += step(runner, []).token_ids
    return tokens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong_at", [None, 0, 1, 3])
def test_output_is_that_without_drafts(kind: str, wrong_at: int | None):
    sampling = KINDS[kind]
    expected = without_drafts(sampling, 25)
    runner, tokens = start(sampling)
    num_steps = 0
    while len(tokens) < 20:
        known = len(tokens)
        drafts = expected[known : known + 4]
        if wrong_at is not None:
            drafts[wrong_at] = (drafts[wrong_at] + 1) % 90
        result = step(runner, drafts)
        num_accepted = 4 if wrong_at is None else wrong_at
        assert (result.sequences, result.positions, result.num_tokens) == ([7], [known], [num_accepted + 1])
        tokens += result.token_ids
        num_steps += 1
    assert tokens == expected[: len(tokens)]
    assert num_steps == -(-19 // (1 if wrong_at == 0 else 5 if wrong_at is None else wrong_at + 1))


def test_drafts_come_and_go_with_plain_steps_between():
    sampling = KINDS["penalties"]
    expected = without_drafts(sampling, 24)
    runner, tokens = start(sampling)
    for drafts in ([], 3 * [1], [], 1 * [2], expected[5:8], [], []):
        tokens += step(runner, drafts).token_ids
    # One token from the prompt, one from each step, and three drafts.
    assert tokens == expected[:11]


def test_a_row_without_drafts_beside_one_with_and_logprobs_of_each_token():
    greedy = SamplingParams(temperature=0.0, logprobs=1)
    runner = fake_runner()
    rows = [
        step_pb2.NewRow(
            row=row,
            sequence=10 + row,
            token_ids=PROMPT[row:],
            num_prompt_tokens=7 - row,
            sampling=greedy,
            block_ids=range(1 + 5 * row, 6 + 5 * row),
        )
        for row in range(3)
    ]
    first = said(runner.execute(step_pb2.StepPlan(new_rows=rows, rows=[0, 1, 2], num_tokens=[7, 6, 5])))
    alone, tokens = start(greedy)
    assert tokens == first.token_ids[:1]
    following = [step(alone, []).token_ids[0] for _ in range(3)]
    plan = step_pb2.StepPlan(decode_rows=decodes(2, 1), **drafting({0: following[:2]}))
    result = runner.execute(plan)
    columns = said(result)
    assert (columns.sequences, columns.positions, columns.num_tokens) == ([12, 11, 10], [1, 1, 1], [1, 1, 3])
    assert columns.token_ids[2:] == following
    assert [entry.chosen.token_id for entry in result.logprobs] == columns.token_ids


def test_logits_that_are_not_finite_after_a_draft_fail_the_row():
    # Greedy never samples POISON, so the draft is rejected and what follows it does not matter.
    runner, _ = start(KINDS["greedy"])
    assert len(step(runner, [POISON, 4]).token_ids) == 1
    forced = SamplingParams(temperature=0.0, logit_bias={POISON: 100.0})
    runner, tokens = start(forced)
    assert tokens == [POISON]
    result = runner.execute(step_pb2.StepPlan(**drafting({0: [POISON, POISON]})))
    assert list(result.failed_sequences) == [7]
    assert said(result) == Said([], [], [], [])
