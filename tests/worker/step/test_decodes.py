"""Steps whose rows all decode: C++ gives the same results as numpy, and leaves every irregular step to numpy."""

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch

from protos import inference_pb2, step_pb2
from tests.fakes.fake_model import VOCAB_SIZE
from tests.support.kernels.kernel_paths import native
from tests.support.scheduler import steps as messages
from tests.support.scheduler.steps import decodes
from worker.cpu.runner import Decodes
from worker.errors import PlanError
from worker.sampling.sampler import Greedy
from worker.step.batch import InputBatch, build_batch
from worker.step.results import put_columns, sample_rows
from worker.step.rows import Rows

# The number of tokens known to each row, all but one of which are computed. Blocks have 8 tokens.
LENGTHS = {0: 3, 2: 8, 3: 9, 5: 17}


def make_rows() -> tuple[Rows, InputBatch]:
    rows = Rows(
        max_num_seqs=6,
        max_num_batched_tokens=32,
        max_model_len=40,
        block_size=8,
        num_blocks=40,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset(),
    )
    free = np.random.default_rng(0).permutation(np.arange(1, 41)).tolist()
    rows.apply(
        step_pb2.StepPlan(
            new_rows=[
                step_pb2.NewRow(
                    row=row,
                    sequence=100 + row,
                    token_ids=range(row, row + length),
                    num_prompt_tokens=length - row % 2,
                    num_computed_tokens=length - 1,
                    block_ids=[free.pop() for _ in range(-(-length // 8))],
                    sampling=inference_pb2.SamplingParams(temperature=0.0),
                )
                for row, length in LENGTHS.items()
            ]
        )
    )
    return rows, InputBatch(max_tokens=32, max_rows=6, max_blocks=5)


def drafting(drafts: dict[int, list[int]], *plain: int) -> dict[str, Any]:
    """The fields of a plan whose rows all decode: `plain` ones, then some with these drafts."""
    return {"decode_rows": decodes(*plain), **messages.drafting(drafts)}


def counting_up(batch: InputBatch, finite: int) -> Greedy:
    """Each row's likeliest tokens are 40, 41, ...; only the logits of the first `finite` are finite."""
    turns = [turn for start, end in itertools.pairwise(batch.query_starts.tolist()) for turn in range(end - start)]
    largest = [1.0 if turn < finite else float("nan") for turn in turns]
    return Greedy(token_ids_L=torch.tensor(turns) + 40, largest_L=torch.tensor(largest))


def state(rows: Rows) -> dict[str, list[object]]:
    return {name: value.tolist() for name, value in vars(rows).items() if isinstance(value, np.ndarray)}


def numbers(batch: InputBatch) -> dict[str, object]:
    return {
        name: getattr(batch, name).tolist()
        for name in (
            "token_ids_T",
            "positions_T",
            "slots_T",
            "query_starts",
            "context_lens_S",
            "block_tables_SB",
            "logit_indices",
        )
    }


@pytest.mark.parametrize("named", [(0,), (5, 2, 0, 3), (3, 0), (2, 3, 5)])
def test_begin_and_end_are_what_numpy_says(named: tuple[int, ...]) -> None:
    (rows, batch), (plain_rows, plain_batch) = make_rows(), make_rows()
    steps = Decodes(native(), rows, batch)
    plan = step_pb2.StepPlan(decode_rows=decodes(*named))
    for turn in range(3):
        got = steps.begin(plan)
        assert got is not None
        expected = build_batch(plain_rows, plain_rows.schedule(plan), plain_batch)
        assert got.rows_S.tolist() == got.rows_N.tolist() == expected.rows_N.tolist() == list(named)
        assert numbers(batch) == numbers(plain_batch)
        assert state(rows) == state(plain_rows)

        token_ids = torch.tensor([30 + 7 * turn + row for row in named])
        scores = Greedy(token_ids_L=token_ids, largest_L=torch.ones(len(named)))
        result = step_pb2.StepResult()
        assert steps.end(scores, result)
        positions = plain_rows.output_positions(expected.rows_N)
        said = sample_rows(plain_rows, expected.rows_N, None, scores, None)
        assert result.token_ids == said.tokens_ND1[:, 0].astype("<i4").tobytes()
        assert result.sequences == plain_rows.sequence_R[expected.rows_N].astype("<i8").tobytes()
        assert result.positions == positions.astype("<i4").tobytes()
        assert state(rows) == state(plain_rows)
        # Each row gets another block; the next steps need some of these.
        for each in (rows, plain_rows) if turn == 0 else ():
            each.apply(
                step_pb2.StepPlan(
                    grown_rows=named, num_new_blocks=[1] * len(named), new_blocks=range(1, 1 + len(named))
                )
            )


def test_blocks_of_a_longer_step_before_are_not_seen() -> None:
    rows, batch = make_rows()
    steps = Decodes(native(), rows, batch)
    assert steps.begin(step_pb2.StepPlan(decode_rows=decodes(5, 0)))
    assert steps.begin(step_pb2.StepPlan(decode_rows=decodes(3, 2)))
    assert batch.block_tables_SB.tolist() == rows.block_ids_RB[[3, 2], :2].tolist()


REFUSED = {
    "a row twice": {"decode_rows": decodes(0, 3, 0)},
    "a free row": {"decode_rows": decodes(0, 1)},
    "no such row": {"decode_rows": decodes(0, 6)},
    "half a row": {"decode_rows": decodes(0) + b"\0"},
    "no row": {},
    "more rows than there are": {"decode_rows": decodes(*range(7))},
    "a row twice, once with a draft": drafting({2: [4]}, 2),
    "a free row with a draft": drafting({1: [4]}),
    "no such row with a draft": drafting({60_000: [4]}),
    "half a row beside one with a draft": {**drafting({2: [4]}), "decode_rows": b"\0"},
    "a token that is not there": drafting({2: [VOCAB_SIZE]}),
    "more drafts than blocks": drafting({3: [1] * 8}),
    "more tokens than there is room for": drafting({3: [1] * 15, 5: [1] * 16}),
    "a token below 0": drafting({2: [-1]}),
    "fewer drafts than said": {**drafting({3: [1, 2]}), "draft_token_ids": bytes(4)},
    "half a draft": {**drafting({3: [1, 2]}), "draft_token_ids": bytes(6)},
    "fewer counts than rows": {**drafting({3: [1, 2], 0: [3]}), "num_drafts": b"\3\0\0\0"},
    "half a count": {**drafting({3: [1]}), "num_drafts": bytes(2)},
    "half a row with drafts": {**drafting({3: [1]}), "rows_with_drafts": bytes(1)},
    "no draft": drafting({3: []}),
    "a row without drafts among those with": drafting({3: [], 0: [3]}),
    "drafts of no row": {**drafting({}, 0), "draft_token_ids": bytes(4)},
    "counts of no row": {**drafting({}, 0), "num_drafts": b"\1\0\0\0"},
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_not_in_order_is_left_to_numpy(why: str) -> None:
    rows, batch = make_rows()
    before, plan = state(rows), step_pb2.StepPlan(**REFUSED[why])
    assert Decodes(native(), rows, batch).begin(plan) is None
    assert state(rows) == before
    with pytest.raises(PlanError):
        rows.schedule(plan)


def test_rows_without_room_or_with_more_to_compute_are_left_to_numpy() -> None:
    full, batch = make_rows()
    steps, plan = Decodes(native(), full, batch), step_pb2.StepPlan(decode_rows=decodes(3, 2))
    assert steps.begin(plan)
    assert steps.end(Greedy(token_ids_L=torch.tensor([1, 2]), largest_L=torch.ones(2)), step_pb2.StepResult())
    before = state(full)
    # Row 2 has one block of 8 tokens, all of them computed.
    assert steps.begin(plan) is None
    assert state(full) == before
    with pytest.raises(PlanError, match="row 2 would have 9 tokens computed; blocks held: 1"):
        full.schedule(plan)

    # Nothing was appended to row 0, so the second step has no token of it to compute.
    assert steps.begin(step_pb2.StepPlan(decode_rows=decodes(0)))
    assert steps.begin(step_pb2.StepPlan(decode_rows=decodes(0))) is None
    longer = copy.deepcopy(full)
    longer.num_computed_tokens_R[5] -= 1
    assert Decodes(native(), longer, batch).begin(step_pb2.StepPlan(decode_rows=decodes(5))) is None


DRAFTED: list[tuple[tuple[int, ...], dict[int, list[int]]]] = [
    ((), {3: [40, 41]}),
    ((), {5: [9, 41], 0: [9]}),
    ((3, 2), {0: [9, 9], 5: [40, 41, 9, 43]}),
    ((5, 0), {3: [40, 9, 42]}),
]


@pytest.mark.parametrize(("plain", "given"), DRAFTED)
def test_drafts_are_verified_as_numpy_does(plain: tuple[int, ...], given: dict[int, list[int]]) -> None:
    """The likeliest tokens of each row count up from 40: a draft is right as long as it does, too."""
    (rows, batch), (plain_rows, plain_batch) = make_rows(), make_rows()
    named = [*plain, *given]
    for each in (rows, plain_rows):
        each.apply(
            step_pb2.StepPlan(grown_rows=named, num_new_blocks=[1] * len(named), new_blocks=range(1, 1 + len(named)))
        )
    steps = Decodes(native(), rows, batch)
    without = step_pb2.StepPlan(decode_rows=decodes(*named))
    for plan in (without, step_pb2.StepPlan(**drafting(given, *plain)), without):
        got = steps.begin(plan)
        assert got is not None
        expected = build_batch(plain_rows, plain_rows.schedule(plan), plain_batch)
        assert got.rows_S.tolist() == got.rows_N.tolist() == expected.rows_N.tolist() == named
        has_drafts = expected.num_drafts_N is not None
        assert (got.num_drafts_N is None) is not has_drafts
        if got.num_drafts_N is not None and expected.num_drafts_N is not None:
            assert got.num_drafts_N.tolist() == expected.num_drafts_N.tolist()
        assert numbers(batch) == numbers(plain_batch)
        assert state(rows) == state(plain_rows)

        scores = counting_up(batch, finite=3)
        result, wanted = step_pb2.StepResult(), step_pb2.StepResult()
        positions = plain_rows.output_positions(expected.rows_N)
        said = sample_rows(plain_rows, expected.rows_N, expected.num_drafts_N, scores, None)
        put_columns(
            wanted,
            plain_rows.sequence_R[expected.rows_N],
            positions if expected.num_drafts_N is None else positions - expected.num_drafts_N,
            said.tokens_ND1,
            said.counts_N if has_drafts else None,
            said.failed_N,
        )
        assert steps.end(scores, result)
        assert result == wanted
        assert state(rows) == state(plain_rows)
        if has_drafts:
            width = steps.tokens_ND1.shape[1]
            assert steps.tokens_ND1.tolist() == said.tokens_ND1[:, :width].tolist()
            assert not said.tokens_ND1[:, width:].any()
            assert steps.counts_N.tolist() == said.counts_N.tolist()


def test_a_row_that_fails_after_right_drafts_is_left_to_numpy() -> None:
    rows, batch = make_rows()
    steps = Decodes(native(), rows, batch)
    assert steps.begin(step_pb2.StepPlan(**drafting({3: [40, 41, 42], 5: [1]})))
    before, result = state(rows), step_pb2.StepResult()
    assert not steps.end(counting_up(batch, finite=3), result)
    assert state(rows) == before
    assert result == step_pb2.StepResult()
    assert steps.end(counting_up(batch, finite=4), result)


def test_steps_with_other_rows_are_left_to_numpy() -> None:
    rows, batch = make_rows()
    plan = step_pb2.StepPlan(decode_rows=decodes(0), rows=[2], num_tokens=[1])
    assert Decodes(native(), rows, batch).begin(plan) is None


@pytest.mark.parametrize("largest", [float("nan"), float("inf"), float("-inf"), None])
def test_failed_rows_are_left_to_numpy(largest: float | None) -> None:
    """largest is None: the row failed earlier."""
    rows, batch = make_rows()
    steps = Decodes(native(), rows, batch)
    assert steps.begin(step_pb2.StepPlan(decode_rows=decodes(0, 3)))
    rows.failed_R[3] = largest is None
    before, result = state(rows), step_pb2.StepResult()
    largest_L = torch.tensor([1.0, 1.0 if largest is None else largest])
    scores = Greedy(token_ids_L=torch.tensor([1, 2]), largest_L=largest_L)
    assert not steps.end(scores, result)
    assert state(rows) == before
    assert result == step_pb2.StepResult()
