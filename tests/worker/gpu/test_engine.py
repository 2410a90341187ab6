"""The GPU's engine over a model without weights, in Triton's interpreter: whatever else is in its steps, a request's
output equals what the CPU runner computes for it alone."""

import numpy as np
import pytest

from configs.sampling import PARAMETERS
from protos.inference_pb2 import SamplingParams
from tests.fakes.fake_model import POISON
from tests.support.gpu.gpu_engine import EngineRun, outputs_alone
from worker.gpu.sampler import Demands
from worker.sampling.features import RowSampling
from worker.sampling.filters import SamplingKind

GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=1.0, seed=11)
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]
# Each of these changes the output for PROMPT.
KINDS = {
    "greedy": GREEDY,
    "drawn": DRAWN,
    "filtered": SamplingParams(temperature=1.5, seed=3, top_k=20, top_p=0.9, min_p=0.01),
    "biased": SamplingParams(temperature=0.0, logit_bias={7: 4.0, 50: 3.5, 90: -100.0}),
    "penalised": SamplingParams(
        temperature=0.0,
        repetition_penalty=1.8,
        presence_penalty=0.5,
        frequency_penalty=0.9,
        logit_bias={30: 7.0, 31: 6.0},
    ),
    "made to wait": SamplingParams(temperature=0.0, min_tokens=5, logit_bias={2: 8.0, 3: 7.0}, stop_token_ids=[3]),
    "drawn and penalised": SamplingParams(temperature=1.0, seed=4, frequency_penalty=1.5, logit_bias={82: 6.0}),
}


@pytest.fixture(scope="module")
def alone() -> dict[str, list[int]]:
    """Outputs computed alone, by kind."""
    return {kind: outputs_alone(PROMPT, params, 9) for kind, params in KINDS.items()}


def test_kinds_differ(alone: dict[str, list[int]]) -> None:
    """Otherwise the tests below would prove nothing."""
    assert len({tuple(output) for output in alone.values()}) == len(KINDS)


def test_each_kind_in_one_batch_gets_what_it_gets_alone(alone: dict[str, list[int]]) -> None:
    run = EngineRun(max_num_seqs=len(KINDS), max_num_batched_tokens=128)
    rows = dict(enumerate(KINDS))
    for row, kind in rows.items():
        run.add(row, PROMPT, KINDS[kind])
    # Chunks that end within a block and at a block's end, and rows that decode beside them.
    run.step(dict.fromkeys(rows, 5))
    run.step({row: 3 if row % 2 else 6 for row in rows})
    run.step({row: 3 if row % 2 else 1 for row in rows})
    while min(len(sequence.output) for sequence in run.rows.values()) < 4:
        run.step(dict.fromkeys(reversed(rows), 1))
    for row, kind in rows.items():
        assert run.rows[row].output == alone[kind][: len(run.rows[row].output)], kind


def test_only_decodes_need_no_more_than_their_rows(alone: dict[str, list[int]]) -> None:
    run = EngineRun()
    assert run.run(4, PROMPT, GREEDY, 9) == alone["greedy"]
    assert run.model.reserved == (64, 6, 128)
    assert run.model.shapes == [(11, 1)] + [(1, 1)] * 8


def test_large_steps_without_graphs_are_padded_to_multiples_of_16(alone: dict[str, list[int]]) -> None:
    """Whole prompts and decodes, up to the largest possible step; outputs are unchanged."""
    run = EngineRun(max_num_seqs=70, max_num_batched_tokens=90)
    for row in range(70):
        run.add(row, PROMPT[: 1 + (row == 69)], GREEDY)
    run.step(dict.fromkeys(range(64), 1))
    run.step({**dict.fromkeys(range(64, 69), 1), 69: 2, **dict.fromkeys(range(58), 1)})
    run.step(dict.fromkeys(range(70), 1))
    assert [tokens for tokens, _ in run.model.shapes] == [64, 80, 70]
    one = outputs_alone(PROMPT[:1], GREEDY, 3)
    for row in range(69):
        assert run.rows[row].output == one[: len(run.rows[row].output)], row
    assert run.rows[69].output == outputs_alone(PROMPT[:2], GREEDY, 2)
    run.add(0, PROMPT * 8, GREEDY)
    run.step({0: 88})
    assert run.model.shapes[-1][0] == 90


@pytest.mark.parametrize("kind", ["penalised", "made to wait", "drawn and penalised"])
def test_a_row_that_comes_back_goes_on(kind: str, alone: dict[str, list[int]]) -> None:
    """It comes back in another row, beside the one that took its place with other penalties; its output counts."""
    expected = alone[kind]
    run = EngineRun()
    run.add(0, PROMPT, KINDS[kind])
    run.step({0: 11})
    run.step({0: 1})
    run.free(0)
    other = SamplingParams(temperature=0.0, repetition_penalty=5.0, logit_bias={20: 1.0, 21: -1.0}, min_tokens=9)
    run.add(0, [50, 51], other)
    run.add(3, PROMPT, KINDS[kind], output=expected[:2])
    run.step({0: 2, 3: 13})
    for _ in range(5):
        run.step({3: 1, 0: 1})
    assert run.rows[3].output == expected[:8]
    assert run.rows[0].output == outputs_alone([50, 51], other, 6)


def test_tables_of_adjustments_grow_with_their_rows_and_lists() -> None:
    """Entries survive when tables grow, and each place belongs to one row."""
    params = [
        SamplingParams(temperature=0.0, frequency_penalty=0.3 * row, logit_bias={60 + row: 3.0, 70 + row: 2.0})
        for row in range(1, 7)
    ]
    for i in range(20):
        params[4].logit_bias[i] = 2.5
    run = EngineRun()
    for row, each in enumerate(params):
        run.add(row, PROMPT[: row + 3], each)
        run.step({row: row + 3})
    while len(run.rows[5].output) < 4:
        run.step(dict.fromkeys(range(6), 1))
    for row, each in enumerate(params):
        assert run.rows[row].output == outputs_alone(PROMPT[: row + 3], each, 4), row


def test_logits_that_are_not_finite_fail_their_row_alone() -> None:
    run = EngineRun()
    run.add(1, [5, POISON, 6], GREEDY)
    run.add(2, PROMPT, GREEDY)
    run.step({1: 3, 2: 11})
    # The next step begins before the failure is known; its token is -1, which embeddings accept.
    run.step({1: 1, 2: 1})
    assert run.rows[1].output == [-1, -1]
    assert run.rows[2].output == outputs_alone(PROMPT, GREEDY, 2)


def test_a_failed_row_with_penalties_counts_nothing() -> None:
    run = EngineRun()
    run.add(1, [5, POISON, 6], KINDS["penalised"])
    assert run.step({1: 3}).tokens_ND1.tolist() == [[-1]]
    assert run.step({1: 1}).tokens_ND1.tolist() == [[-1]]


def test_chunks_without_an_end_say_nothing() -> None:
    run = EngineRun()
    run.add(1, PROMPT, GREEDY)
    outputs = run.step({1: 4})
    assert outputs.tokens_ND1.shape == (0, 1)
    assert outputs.counts_N.shape == (0,)
    assert outputs.seconds > 0


def test_after_a_reset_rows_begin_anew() -> None:
    run = EngineRun()
    for row, kind in enumerate(("penalised", "drawn")):
        run.add(row, PROMPT, KINDS[kind])
    run.begin({0: 11, 1: 11})
    run.engine.reset()
    run.rows.clear()
    # Rows that had penalties, or drew their tokens, no longer do.
    for row in (0, 1):
        run.add(row, PROMPT, GREEDY)
    run.step({0: 11, 1: 11})
    assert run.rows[0].output == run.rows[1].output == outputs_alone(PROMPT, GREEDY, 1)


def test_rows_demand_the_least_kind_that_serves_them() -> None:
    demands = Demands(4)
    for new in (
        RowSampling(row=0),
        RowSampling(row=1, temperature=0.7, num_logprobs=0),
        RowSampling(row=2, temperature=0.7, top_k=3),
        # Without a temperature there is nothing to filter.
        RowSampling(row=3, top_p=0.5, num_logprobs=2),
    ):
        demands.take(new)
    for rows, kind in (
        ([0, 3], SamplingKind.GREEDY),
        ([0, 1], SamplingKind.DRAWS),
        ([1, 2], SamplingKind.FILTERS),
        ([2], SamplingKind.FILTERS),
    ):
        assert demands.kind(np.array(rows)) is kind
    assert demands.asking(np.array([0, 1, 2, 3, 1])).tolist() == [1, 3, 4]
    for row in (1, 2, 3):
        demands.free(row)
    assert demands.asking(np.array([0])).tolist() == []
    demands.take(RowSampling(row=2))
    assert demands.kind(np.array([0, 2])) is SamplingKind.GREEDY


def test_every_parameter_of_the_table_means_the_same_as_on_a_cpu() -> None:
    """Each parameter by itself, and all of them together."""
    examples = {parameter.name: parameter.example for parameter in PARAMETERS}
    drawn: dict[str, float] = {"temperature": 1.0, "seed": 3}
    kinds = [drawn | {name: example} for name, example in examples.items()] + [drawn | examples]
    run = EngineRun(max_num_seqs=len(kinds), max_num_batched_tokens=128)
    rows = [SamplingParams(**kind) for kind in kinds]  # type: ignore[arg-type]
    for row, params in enumerate(rows):
        run.add(row, PROMPT, params)
    run.step(dict.fromkeys(range(len(rows)), len(PROMPT)))
    for _ in range(5):
        run.step(dict.fromkeys(range(len(rows)), 1))
    for row, params in enumerate(rows):
        assert run.rows[row].output == outputs_alone(PROMPT, params, 6), kinds[row]
