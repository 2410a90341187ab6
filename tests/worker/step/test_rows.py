"""Rows: plans applied as differences, and every invariant of protos/step.proto that a plan can break."""

from typing import Any

import numpy as np
import pytest

from protos import inference_pb2, step_pb2
from tests.support.scheduler.steps import decodes, drafting
from worker.errors import PlanError
from worker.step.batch import InputBatch, build_batch
from worker.step.inputs import BatchRows
from worker.step.rows import Rows


def make_rows(**changes: Any) -> Rows:
    sizes = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "max_model_len": 40,
        "block_size": 8,
        "num_blocks": 12,
        "vocab_size": 50,
    }
    return Rows(**{**sizes, **changes}, eos_token_ids=frozenset({2}))


def new_row(row: int = 0, sequence: int = 1, tokens: int = 10, **changes) -> step_pb2.NewRow:
    fields = {
        "row": row,
        "sequence": sequence,
        "token_ids": list(range(1, tokens + 1)),
        "num_prompt_tokens": tokens,
        "block_ids": range(1, 2 + tokens // 8),
        "sampling": inference_pb2.SamplingParams(temperature=0.0),
    }
    return step_pb2.NewRow(**{**fields, **changes})


def plan(*new_rows: step_pb2.NewRow, rows: list[int], num_tokens: list[int], **fields) -> step_pb2.StepPlan:
    return step_pb2.StepPlan(new_rows=new_rows, rows=rows, num_tokens=num_tokens, **fields)


def _drafting(drafts: dict[int, list[int]], **changes: bytes) -> step_pb2.StepPlan:
    return step_pb2.StepPlan(**{**drafting(drafts), **changes})


def run(rows: Rows, step: step_pb2.StepPlan, sampled: int = 7):
    """Applies a plan and appends `sampled` to every row that samples. Returns the batch and these rows."""
    batch, batch_rows = begin(rows, step)
    if batch_rows.num_drafts_N is not None:
        rows.settle_drafts(batch_rows.rows_N, batch_rows.num_drafts_N)
    rows.append(batch_rows.rows_N, np.full(len(batch_rows.rows_N), sampled))
    return batch, batch_rows.rows_N.tolist()


def begin(rows: Rows, step: step_pb2.StepPlan) -> tuple[InputBatch, BatchRows]:
    """Applies a plan and builds its batch."""
    batch = InputBatch(
        max_tokens=rows.max_num_batched_tokens, max_rows=rows.max_num_seqs, max_blocks=rows.block_ids_RB.shape[1]
    )
    rows.apply(step)
    return batch, build_batch(rows, rows.schedule(step), batch)


def test_a_prompt_in_chunks_samples_once_and_then_token_by_token():
    rows = make_rows()
    batch, sampling = run(rows, plan(new_row(), rows=[0], num_tokens=[6]))
    assert sampling == []
    assert batch.token_ids_T.tolist() == [1, 2, 3, 4, 5, 6]
    assert batch.logit_indices.tolist() == []
    batch, sampling = run(rows, plan(rows=[0], num_tokens=[4]))
    assert sampling == [0]
    assert batch.positions_T.tolist() == [6, 7, 8, 9]
    # Blocks 1 and 2 of 8 tokens.
    assert batch.slots_T.tolist() == [14, 15, 16, 17]
    assert batch.logit_indices.tolist() == [3]
    assert batch.block_tables_SB.tolist() == [[1, 2]]
    batch, sampling = run(rows, plan(rows=[0], num_tokens=[1]))
    # The sampled token comes from the row's own buffer: no plan carried it.
    assert (batch.token_ids_T.tolist(), batch.positions_T.tolist(), sampling) == ([7], [10], [0])


def test_rows_of_one_batch_keep_to_themselves():
    rows = make_rows()
    long, short = new_row(0, 1, 10), new_row(3, 2, 3, block_ids=[9], token_ids=[30, 31, 32])
    batch, sampling = run(rows, plan(long, short, rows=[3, 0], num_tokens=[3, 9]))
    assert sampling == [3]
    assert batch.query_starts.tolist() == [0, 3, 12]
    assert batch.context_lens_S.tolist() == [3, 9]
    assert batch.token_ids_T.tolist() == [30, 31, 32, *range(1, 10)]
    assert batch.slots_T.tolist() == [72, 73, 74, *range(8, 17)]
    assert batch.block_tables_SB.tolist() == [[9, 0], [1, 2]]
    assert batch.logit_indices.tolist() == [2]
    # The batch's table is as wide as the blocks in use, not as the rows' own tables.
    batch, _ = run(rows, plan(rows=[3], num_tokens=[1]))
    assert batch.block_tables_SB.tolist() == [[9]]


def test_a_prefix_found_is_not_computed_again():
    rows = make_rows()
    batch, sampling = run(rows, plan(new_row(num_computed_tokens=8, block_ids=[5, 6]), rows=[0], num_tokens=[2]))
    assert batch.positions_T.tolist() == [8, 9]
    assert batch.slots_T.tolist() == [48, 49]
    assert batch.context_lens_S.tolist() == [10]
    assert sampling == [0]


def test_a_row_is_used_again_with_nothing_left_of_its_past():
    rows = make_rows()
    run(rows, plan(new_row(tokens=20, block_ids=[1, 2, 3]), rows=[0], num_tokens=[20]))
    step = plan(new_row(0, 2, 3, block_ids=[4]), rows=[0], num_tokens=[3], freed_rows=[0])
    batch, sampling = run(rows, step)
    assert sampling == [0]
    assert batch.block_tables_SB.tolist() == [[4]]
    assert rows.block_ids_RB[0].tolist() == [4, 0, 0, 0, 0]
    assert rows.num_tokens_R[0] == 4


def test_a_returning_row_goes_on_at_its_output_position():
    rows = make_rows()
    _, batch_rows = begin(rows, plan(new_row(tokens=10, num_prompt_tokens=6), rows=[0], num_tokens=[10]))
    assert rows.output_positions(batch_rows.rows_N).tolist() == [4]


def test_block_tables_grow_by_what_is_appended():
    rows = make_rows()
    one, two = new_row(0, 1, 8, block_ids=[1]), new_row(1, 2, 8, block_ids=[2])
    run(rows, plan(one, two, rows=[0, 1], num_tokens=[8, 8]))
    growth = {"grown_rows": [1, 0], "num_new_blocks": [2, 1], "new_blocks": [7, 8, 9]}
    batch, _ = run(rows, plan(rows=[0, 1], num_tokens=[1, 1], **growth))
    assert batch.block_tables_SB.tolist() == [[1, 9], [2, 7]]
    assert batch.slots_T.tolist() == [72, 56]


def test_decodes_come_first_and_need_no_counts():
    rows = make_rows()
    one, two = new_row(0, 1, 8), new_row(3, 2, 8, block_ids=[3, 4])
    run(rows, plan(one, two, rows=[0, 3], num_tokens=[8, 8]))
    late = new_row(1, 3, 5, block_ids=[9])
    batch, sampling = run(rows, plan(late, rows=[1], num_tokens=[4], decode_rows=decodes(3, 0)))
    assert sampling == [3, 0]
    assert batch.query_starts.tolist() == [0, 1, 2, 6]
    assert batch.token_ids_T.tolist() == [7, 7, 1, 2, 3, 4]
    assert batch.logit_indices.tolist() == [0, 1]


def test_drafts_are_computed_like_tokens_and_leave_no_trace_where_they_are_not_said():
    rows = make_rows()
    one, two = new_row(0, 1, 6, block_ids=[1, 2]), new_row(1, 2, 3, block_ids=[9])
    run(rows, plan(one, two, rows=[0, 1], num_tokens=[6, 3]))
    # Row 0 knows 6 tokens and a sampled one; two more are drafts.
    batch, sampling = run(rows, plan(rows=[1], num_tokens=[1], **drafting({0: [40, 41]})))
    assert sampling == [0, 1]
    assert batch.token_ids_T.tolist() == [7, 40, 41, 7]
    assert batch.positions_T.tolist() == [6, 7, 8, 3]
    assert batch.context_lens_S.tolist() == [9, 4]
    # Row 0 has logits after its last known token and after each draft; row 1 after its token.
    assert batch.logit_indices.tolist() == [0, 1, 2, 3]
    # Sampled tokens replace the drafts.
    assert rows.token_ids_RL[0, :8].tolist() == [1, 2, 3, 4, 5, 6, 7, 7]
    assert (rows.num_tokens_R[:2].tolist(), rows.num_computed_tokens_R[:2].tolist()) == ([8, 5], [7, 4])
    # The draft's place in the KV cache is computed again.
    batch, _ = run(rows, plan(rows=[], num_tokens=[], decode_rows=decodes(0)))
    assert (batch.token_ids_T.tolist(), batch.positions_T.tolist()) == ([7], [7])


def test_look_ahead_blocks_are_given_back():
    rows = make_rows()
    run(rows, plan(new_row(0, 1, 6, block_ids=[1, 2, 3]), rows=[0], num_tokens=[6]))
    growth = {"grown_rows": [0], "num_new_blocks": [1], "new_blocks": [8]}
    step = plan(rows=[], num_tokens=[], decode_rows=decodes(0), trimmed_rows=[0], num_kept_blocks=[1], **growth)
    run(rows, step)
    # Trimmed first, then grown.
    assert rows.block_ids_RB[0].tolist() == [1, 8, 0, 0, 0]


def test_blocks_of_a_failed_row_are_handed_out_for_scrubbing_unless_shared():
    # NaN left in a block would reach the row that gets it next, for attention multiplies masked entries by 0.
    rows = make_rows()
    failing, sharing = new_row(0, 1, 10), new_row(1, 2, 10, block_ids=[1, 3])
    run(rows, plan(failing, sharing, rows=[0, 1], num_tokens=[10, 10]))
    rows.failed_R[0] = True
    assert rows.take_spoiled_blocks().tolist() == []
    run(rows, plan(new_row(2, 3, 8, block_ids=[2]), freed_rows=[0], rows=[1], num_tokens=[1]))
    assert rows.take_spoiled_blocks().tolist() == [2]
    assert rows.take_spoiled_blocks().tolist() == []
    assert not rows.failed_R.any()


BROKEN = {
    "freed_rows: row 2 holds no sequence": plan(rows=[0], num_tokens=[1], freed_rows=[2]),
    "freed_rows: row 4 does not exist; max_num_seqs is 4": plan(rows=[0], num_tokens=[1], freed_rows=[4]),
    "freed_rows: row 0 is named 2 times": plan(rows=[0], num_tokens=[1], freed_rows=[0, 0]),
    "new_rows: row 4 does not exist": plan(new_row(4, 9), rows=[4], num_tokens=[1]),
    "new_rows: row 0 holds sequence 1": plan(new_row(0, 9), rows=[0], num_tokens=[1]),
    "new_rows: sequence 1 already has a row": plan(new_row(1, 1), rows=[1], num_tokens=[1]),
    "new_rows: row 1 has 41 token_ids; max_model_len is 40": plan(new_row(1, 9, 41), rows=[1], num_tokens=[1]),
    "new_rows: row 1 has 0 token_ids": plan(new_row(1, 9, token_ids=[]), rows=[1], num_tokens=[1]),
    "new_rows: row 1 has num_prompt_tokens=11 of 10": plan(
        new_row(1, 9, num_prompt_tokens=11), rows=[1], num_tokens=[1]
    ),
    "new_rows: row 1 has num_prompt_tokens=0 of 10": plan(new_row(1, 9, num_prompt_tokens=0), rows=[1], num_tokens=[1]),
    "new_rows: row 1 has num_computed_tokens=10": plan(new_row(1, 9, num_computed_tokens=10), rows=[1], num_tokens=[1]),
    "new_rows: row 1 has token id 50; vocab_size is 50": plan(
        new_row(1, 9, token_ids=[50], num_prompt_tokens=1), rows=[1], num_tokens=[1]
    ),
    "new_rows: row 1 has token id 4294967295": plan(
        new_row(1, 9, token_ids=[2**32 - 1], num_prompt_tokens=1), rows=[1], num_tokens=[1]
    ),
    "new_rows: row 1 gets block 0; there are blocks 1 to 12": plan(
        new_row(1, 9, block_ids=[3, 0]), rows=[1], num_tokens=[1]
    ),
    "new_rows: row 1 gets block 13": plan(new_row(1, 9, block_ids=[13]), rows=[1], num_tokens=[1]),
    "new_rows: row 1 would hold 6 blocks": plan(new_row(1, 9, block_ids=[3] * 6), rows=[1], num_tokens=[1]),
    "new_blocks: row 0 gets block 99": plan(
        rows=[0], num_tokens=[1], grown_rows=[0], num_new_blocks=[1], new_blocks=[99]
    ),
    "num_new_blocks: 1 entries with the sum 1": plan(
        rows=[0], num_tokens=[1], grown_rows=[0], num_new_blocks=[1], new_blocks=[3, 4]
    ),
    "num_new_blocks: 0 entries": plan(rows=[0], num_tokens=[1], grown_rows=[0]),
    "grown_rows: row 3 holds no sequence": plan(
        rows=[0], num_tokens=[1], grown_rows=[3], num_new_blocks=[1], new_blocks=[3]
    ),
    "rows: row 2 holds no sequence": plan(rows=[2], num_tokens=[1]),
    "rows: row 0 is named 2 times": plan(rows=[0, 0], num_tokens=[1, 1]),
    "decode_rows: 3 bytes": plan(rows=[], num_tokens=[], decode_rows=bytes(3)),
    "decode_rows: row 0 would have 5 tokens computed of 10": plan(rows=[], num_tokens=[], decode_rows=decodes(0)),
    "row 0 is named 2 times": plan(rows=[0], num_tokens=[1], decode_rows=decodes(0)),
    "num_drafts: 1 entries with the sum 1, for 1 rows_with_drafts and 2 draft_token_ids": _drafting(
        {0: [4, 5]}, num_drafts=b"\1\0\0\0"
    ),
    "num_drafts: 0 for row 0; a row with drafts has at least 1": _drafting({0: []}),
    "num_drafts: 0 entries with the sum 0": _drafting({0: [4]}, num_drafts=b""),
    "num_drafts: 1 entries with the sum 1, for 0 rows_with_drafts": _drafting(
        {0: [4]}, rows_with_drafts=b"", decode_rows=decodes(0)
    ),
    "num_drafts: 5 bytes": _drafting({0: [4]}, num_drafts=bytes(5)),
    "draft_token_ids: 3 bytes": _drafting({0: [4]}, draft_token_ids=bytes(3)),
    "rows_with_drafts: 1 bytes": _drafting({0: [4]}, rows_with_drafts=bytes(1)),
    "draft_token_ids: token id 50; vocab_size is 50": _drafting({0: [50]}),
    "draft_token_ids: token id -1; vocab_size is 50": _drafting({0: [-1]}),
    "rows_with_drafts: row 0 would have 6 tokens computed of 11": _drafting({0: [5]}),
    "num_drafts: row 0 has 31 drafts after 10 tokens; max_model_len is 40": _drafting({0: [5] * 31}),
    "trimmed_rows: row 1 holds no sequence": plan(rows=[0], num_tokens=[1], trimmed_rows=[1], num_kept_blocks=[1]),
    "num_kept_blocks: 0 entries for 1 trimmed_rows": plan(rows=[0], num_tokens=[1], trimmed_rows=[0]),
    "num_kept_blocks: row 0 would keep 2 blocks of 1; 4 tokens are computed": plan(
        rows=[0], num_tokens=[1], trimmed_rows=[0], num_kept_blocks=[2]
    ),
    "num_kept_blocks: row 0 would keep 0 blocks of 1": plan(
        rows=[0], num_tokens=[1], trimmed_rows=[0], num_kept_blocks=[0]
    ),
    "num_tokens: 1 entries for 0 rows": plan(rows=[], num_tokens=[1]),
    "num_tokens: 0 entries for 0 rows": plan(rows=[], num_tokens=[]),
    "num_tokens: the least is 0, the sum 0": plan(rows=[0], num_tokens=[0]),
    "num_tokens: the least is 33, the sum 33; each must be at least 1, and max_num_batched_tokens is 32": plan(
        rows=[0], num_tokens=[33]
    ),
    "num_tokens: row 0 would have 11 tokens computed; tokens known: 10": plan(rows=[0], num_tokens=[7]),
    "num_tokens: row 0 would have 10 tokens computed; blocks held: 1": plan(rows=[0], num_tokens=[6]),
    "sampling.temperature=nan": plan(
        new_row(1, 9, sampling=inference_pb2.SamplingParams(temperature=float("nan"), seed=1)), rows=[1], num_tokens=[1]
    ),
    "without a seed": plan(
        new_row(1, 9, sampling=inference_pb2.SamplingParams(temperature=1.0)), rows=[1], num_tokens=[1]
    ),
    "sampling.top_p=2; 1e-09 to 1 is valid": plan(
        new_row(1, 9, sampling=inference_pb2.SamplingParams(temperature=0.0, top_p=2.0)), rows=[1], num_tokens=[1]
    ),
    "sampling.logprobs=1025": plan(
        new_row(1, 9, sampling=inference_pb2.SamplingParams(temperature=0.0, logprobs=1025)), rows=[1], num_tokens=[1]
    ),
    "sampling.logit_bias names token 50": plan(
        new_row(1, 9, sampling=inference_pb2.SamplingParams(temperature=0.0, logit_bias={50: 1.0})),
        rows=[1],
        num_tokens=[1],
    ),
    "sampling.stop_token_ids names token 77": plan(
        new_row(1, 9, sampling=inference_pb2.SamplingParams(temperature=0.0, stop_token_ids=[77])),
        rows=[1],
        num_tokens=[1],
    ),
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_broken_plan_is_refused_with_field_and_value(message: str):
    rows = make_rows()
    # Row 0: 10 tokens known, 4 computed, one block of 8.
    run(rows, plan(new_row(block_ids=[1]), rows=[0], num_tokens=[4]))
    with pytest.raises(PlanError) as caught:
        begin(rows, BROKEN[message])
    assert message in str(caught.value)


def test_nothing_is_computed_past_max_model_len():
    rows = make_rows(max_model_len=8, block_size=8)
    run(rows, plan(new_row(tokens=8, block_ids=[1]), rows=[0], num_tokens=[8]))
    with pytest.raises(PlanError, match="9 tokens computed; blocks held: 1"):
        begin(rows, plan(rows=[0], num_tokens=[1]))


def test_clear_frees_every_row():
    rows = make_rows()
    run(rows, plan(new_row(0, 1), new_row(2, 2), rows=[0, 2], num_tokens=[1, 1]))
    rows.clear()
    assert not len(rows.live_rows)
    assert not rows.block_ids_RB.any()
    run(rows, plan(new_row(0, 1), rows=[0], num_tokens=[10]))
