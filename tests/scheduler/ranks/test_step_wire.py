"""The step codec: plans as frames, results as columns."""

from typing import Any

import numpy as np
import pytest

from protos import inference_pb2, step_pb2
from runtime.wire import PROMPT_LOGPROBS_FRAME_BYTES, plan_digest
from scheduler.core.messages import ItemSpan, Plan, PlannedRow
from scheduler.ranks.step_wire import GroupSampling, ResultError, StepCodec
from tests.support.scheduler.steps import decodes, drafting, result_columns

ITEM = ItemSpan(name=bytes(32), first_token=1, num_tokens=2, num_embeddings=2, grid=(1, 1, 2), time_step=0.5)
LOGPROBS = inference_pb2.SamplingParams(logprobs=2)


def plan(step: int, *rows: int, **fields) -> Plan:
    return Plan(step=step, decode_rows=np.array(rows, np.uint16), **fields)


def planned(row: int, sequence: int, params: inference_pb2.SamplingParams | None = None, **changes) -> PlannedRow:
    fields: dict[str, Any] = {
        "token_ids": [5, 6, 7],
        "num_prompt_tokens": 3,
        "num_computed_tokens": 0,
        "block_ids": [4],
        "choice": 0,
        "sampling": GroupSampling(params or inference_pb2.SamplingParams(), group=5, first_choice=0),
    }
    return PlannedRow(row=row, sequence=sequence, **(fields | changes))


def sent(frame: bytes) -> step_pb2.StepPlan:
    return step_pb2.SchedulerToWorker.FromString(frame).plan


def logprobs(*token_ids: int) -> list[inference_pb2.TokenLogprobs]:
    return [inference_pb2.TokenLogprobs(chosen=inference_pb2.TokenLogprob(token_id=token)) for token in token_ids]


def test_every_field_of_a_plan_is_sent():
    codec = StepCodec(9)
    whole = plan(
        1,
        3,
        300,
        freed_rows=[8, 9],
        swapped_out=[(11, 0), (12, 1)],
        swapped_in=[(2, 13)],
        dropped_items=[31],
        forgotten_items=[32, 33],
        encoded_items=[34],
        new_rows=[planned(5, 77, choice=2, num_computed_tokens=1, items=[(34, ITEM)])],
        trimmed_rows=[(3, 4)],
        grown_rows=[3, 5],
        num_new_blocks=[1, 2],
        new_blocks=[20, 21, 22],
        chunks=[(5, 2), (6, 3)],
        rows_with_drafts=np.array([301, 2], np.uint16),
        num_drafts=np.array([1, 2], np.int32),
        draft_token_ids=np.array([40, 41, 70_000], np.int32),
    )
    expected = step_pb2.StepPlan(
        epoch=9,
        step=1,
        freed_rows=[8, 9],
        grown_rows=[3, 5],
        num_new_blocks=[1, 2],
        new_blocks=[20, 21, 22],
        decode_rows=decodes(3, 300),
        rows=[5, 6],
        num_tokens=[2, 3],
        **drafting({301: [40], 2: [41, 70_000]}),
        swap_out_blocks=[11, 12],
        swap_out_host_blocks=[0, 1],
        swap_in_host_blocks=[2],
        swap_in_blocks=[13],
        trimmed_rows=[3],
        num_kept_blocks=[4],
        new_rows=[
            step_pb2.NewRow(
                row=5,
                sequence=77,
                token_ids=[5, 6, 7],
                num_prompt_tokens=3,
                num_computed_tokens=1,
                block_ids=[4],
                sampling=inference_pb2.SamplingParams(),
                choice=2,
                items=[step_pb2.RowItem(number=34, first_token=1, num_tokens=2, grid=[1, 1, 2], time_step=0.5)],
            )
        ],
        dropped_items=[31],
        forgotten_items=[32, 33],
        encoded_items=[34],
    )
    assert sent(codec.encode(whole)) == expected


def test_plans_are_chained_by_the_digests_of_their_frames():
    codec = StepCodec(1)
    first, second = codec.encode(plan(1, 0)), codec.encode(plan(2, 0))
    assert sent(first).previous_digest == b""
    assert sent(second).previous_digest == plan_digest(first)
    with pytest.raises(AssertionError, match="plan 4 follows 2"):
        codec.encode(plan(4, 0))


def test_a_steady_plan_is_two_bytes_a_row():
    frame = StepCodec(1).encode(plan(1, *range(1024)))
    assert len(frame) < 2 * 1024 + 32


def test_prompt_logprobs_are_asked_of_the_first_choice_and_not_again_after_output():
    sampling = GroupSampling(inference_pb2.SamplingParams(prompt_logprobs=3, seed=1), group=5, first_choice=1)
    rows = [
        planned(0, 1, choice=1, sampling=sampling),
        planned(1, 2, choice=2, sampling=sampling),
        planned(2, 3, choice=1, sampling=sampling, num_prompt_tokens=2),
    ]
    message = sent(StepCodec(1).encode(plan(1, new_rows=rows, chunks=[(0, 3), (1, 3), (2, 3)])))
    assert [row.sampling.HasField("prompt_logprobs") for row in message.new_rows] == [True, False, False]
    assert [row.sampling.seed for row in message.new_rows] == [1, 1, 1]


def test_a_result_becomes_columns():
    message = step_pb2.StepResult(
        step=4,
        **result_columns([2**40, 6], [3, 0], [17, 150_000]),
        failed_sequences=[9],
        drafts=[step_pb2.SequenceDrafts(sequence=6, token_ids=[1, 2])],
    )
    result = StepCodec(1).decode(message).result
    assert (result.step, result.sequences.tolist(), result.positions.tolist()) == (4, [2**40, 6], [3, 0])
    assert (result.num_tokens, result.token_ids.tolist()) == (None, [17, 150_000])
    assert (result.failed, result.drafts, result.logprobs) == ({9}, {6: (1, 2)}, {})
    assert not result.why_failed
    message.failure_messages.append("no token is left at output position 7")
    assert StepCodec(1).decode(message).result.why_failed == {9: "no token is left at output position 7"}
    assert [column.dtype for column in (result.sequences, result.positions, result.token_ids)] == ["i8", "i4", "i4"]


def test_logprobs_go_to_those_that_asked_a_token_each():
    codec = StepCodec(1)
    rows = [planned(0, 10, LOGPROBS), planned(1, 11), planned(2, 12, LOGPROBS)]
    codec.encode(plan(1, new_rows=rows, chunks=[(0, 3), (1, 3), (2, 3)]))
    message = step_pb2.StepResult(
        step=1,
        **result_columns([10, 11, 12], [0, 0, 0], [1, 2, 3, 4, 5]),
        num_tokens=np.array([2, 2, 1], "<i4").tobytes(),
        logprobs=logprobs(1, 2, 5),
    )
    result = codec.decode(message).result
    assert result.num_tokens is not None
    assert result.num_tokens.tolist() == [2, 2, 1]
    assert result.logprobs == {10: logprobs(1, 2), 12: logprobs(5)}


def test_logprobs_of_a_row_that_a_later_plan_has_freed_are_still_taken():
    # Several plans are in flight: the second one frees the row of the first one's sequence and gives it to another.
    codec = StepCodec(1)
    codec.encode(plan(1, new_rows=[planned(0, 10, LOGPROBS)], chunks=[(0, 3)]))
    codec.encode(plan(2, freed_rows=[0], new_rows=[planned(0, 11, LOGPROBS)], chunks=[(0, 3)]))
    codec.encode(plan(3, freed_rows=[0], new_rows=[planned(0, 12)], chunks=[(0, 3)]))
    first = step_pb2.StepResult(step=1, **result_columns([10], [0], [5]), logprobs=logprobs(5))
    assert codec.decode(first).result.logprobs == {10: logprobs(5)}
    second = step_pb2.StepResult(step=2, **result_columns([11], [0], [6]), logprobs=logprobs(6))
    assert codec.decode(second).result.logprobs == {11: logprobs(6)}
    third = step_pb2.StepResult(step=3, **result_columns([12], [0], [7]))
    assert codec.decode(third).result.logprobs == {}


def test_prompt_logprobs_of_a_sequence_swapped_out_by_a_later_plan_are_not_lost():
    codec = StepCodec(1)
    codec.encode(plan(1, new_rows=[planned(0, 10, inference_pb2.SamplingParams(prompt_logprobs=0))], chunks=[(0, 2)]))
    codec.encode(plan(2, 3, freed_rows=[0], swapped_out=[(4, 0)]))
    frame = inference_pb2.PromptLogprobs(first_position=1, logprobs=logprobs(6, 7))
    scored = [step_pb2.RowPromptLogprobs(sequence=10, frame=frame)]
    assert codec.decode(step_pb2.StepResult(step=1, prompt_logprobs=scored)).prompt_logprobs == [((5, 0), frame)]
    with pytest.raises(ResultError, match="sequence 10"):
        codec.decode(step_pb2.StepResult(step=2, prompt_logprobs=scored))


COLUMNS = result_columns([1, 2], [0, 0], [5, 6])
FRAME = inference_pb2.PromptLogprobs(logprobs=logprobs(*range(PROMPT_LOGPROBS_FRAME_BYTES // 4)))
BROKEN: dict[str, dict[str, Any]] = {
    "sequences has 9 bytes": COLUMNS | {"sequences": bytes(9)},
    "positions has 3 bytes": COLUMNS | {"positions": bytes(3)},
    "token_ids has 7 bytes": COLUMNS | {"token_ids": bytes(7)},
    "num_tokens has 2 bytes": COLUMNS | {"num_tokens": bytes(2)},
    "positions has 1 entries for 2 sequences": COLUMNS | {"positions": bytes(4)},
    "token_ids has 3 entries for 2 sequences": COLUMNS | {"token_ids": bytes(12)},
    "num_tokens has 1 entries for 2 sequences": COLUMNS | {"num_tokens": b"\2\0\0\0"},
    "num_tokens holds 0": COLUMNS | {"num_tokens": b"\0\0\0\0\2\0\0\0"},
    "token_ids has 2 entries; the sum of num_tokens is 3": COLUMNS | {"num_tokens": b"\1\0\0\0\2\0\0\0"},
    "failure_messages has 1 entries for 2": COLUMNS | {"failed_sequences": [3, 4], "failure_messages": ["why"]},
    "token_ids holds -1": COLUMNS | {"token_ids": b"\1\0\0\0" + b"\xff" * 4},
    "logprobs has 1 entries where 0 tokens asked": COLUMNS | {"logprobs": logprobs(5)},
    "prompt_logprobs has a frame of [0-9]* bytes": COLUMNS
    | {"prompt_logprobs": [step_pb2.RowPromptLogprobs(sequence=9, frame=FRAME)]},
    "prompt_logprobs has a frame of sequence 2, which did not": COLUMNS
    | {"prompt_logprobs": [step_pb2.RowPromptLogprobs(sequence=2)]},
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_broken_result_is_refused_with_field_and_value(message: str):
    codec = StepCodec(1)
    scoring = planned(0, 9, inference_pb2.SamplingParams(prompt_logprobs=0))
    codec.encode(plan(1, new_rows=[scoring], chunks=[(0, 3)]))
    with pytest.raises(ResultError, match=message):
        codec.decode(step_pb2.StepResult(step=1, **BROKEN[message]))


def test_missing_logprobs_are_noticed():
    codec = StepCodec(1)
    codec.encode(plan(1, new_rows=[planned(0, 1, LOGPROBS)], chunks=[(0, 3)]))
    with pytest.raises(ResultError, match="logprobs has 0 entries where 1 tokens asked"):
        codec.decode(step_pb2.StepResult(step=1, **COLUMNS))


def test_an_empty_result_is_one():
    # All rows of the step were chunks of prompts.
    result = StepCodec(1).decode(step_pb2.StepResult(step=1)).result
    assert (len(result.sequences), len(result.token_ids)) == (0, 0)
