"""The GPU runner over an engine that computes nothing: the inputs that the engine gets, and the use of its outputs."""

import threading

import numpy as np
import pytest
import torch

from kernels.backend import gpu_backend
from protos import inference_pb2, step_pb2
from protos.inference_pb2 import SamplingParams
from tests.fakes.fake_model import VOCAB_SIZE, fake_config
from tests.fakes.gpu.gpu_engine import HeldEngine
from tests.support.gpu.gpu import gpu_device
from tests.support.scheduler.steps import decodes, drafting, said
from worker.errors import PlanError
from worker.gpu.runner import GpuResult, GpuRunner
from worker.gpu.swap import GpuSwapSpace
from worker.layers.kv_cache import KVCache
from worker.sampling.adjustments.bias import Bias
from worker.sampling.adjustments.min_tokens import MinTokens
from worker.sampling.adjustments.penalties import Penalties
from worker.step.inputs import LAST_SAMPLED, Logprobs, StepInputs
from worker.step.rows import Rows

GREEDY = SamplingParams(temperature=0.0)
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]


@pytest.fixture
def engine() -> HeldEngine:
    return HeldEngine()


@pytest.fixture
def runner(engine: HeldEngine) -> GpuRunner:
    rows = Rows(
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=128,
        block_size=8,
        num_blocks=32,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset({2}),
    )
    device = gpu_device()
    path = gpu_backend(torch.float32, device.torch_device)
    kv_cache = KVCache(fake_config(), num_blocks=33, block_size=8, backend=path)
    return GpuRunner(
        engine,
        rows,
        inference_pb2.ModelInfo(name="fake"),
        swap_space=GpuSwapSpace(kv_cache, device, 2),
        max_steps_in_flight=3,
    )


def new_row(row: int, sequence: int, tokens: list[int], blocks: list[int], sampling=GREEDY, **fields):
    fields = {"num_prompt_tokens": len(tokens), **fields}
    return step_pb2.NewRow(row=row, sequence=sequence, token_ids=tokens, block_ids=blocks, sampling=sampling, **fields)


def begin(runner: GpuRunner, *rows: int, new=(), num_tokens=(), **fields) -> GpuResult:
    """Begins a step. Rows decode, unless num_tokens says how many tokens each computes."""
    if num_tokens:
        return runner.begin(step_pb2.StepPlan(new_rows=new, rows=rows, num_tokens=num_tokens, **fields))
    return runner.begin(step_pb2.StepPlan(new_rows=new, decode_rows=decodes(*rows), **fields))


def table_changes(inputs: StepInputs) -> list[tuple[int, int, int]]:
    changes = inputs.table_changes
    if changes is None:
        return []
    return list(zip(changes.rows_C.tolist(), changes.places_C.tolist(), changes.block_ids_C.tolist(), strict=True))


def test_steps_go_on_with_tokens_that_the_host_does_not_know(runner: GpuRunner, engine: HeldEngine):
    first = begin(runner, 1, new=[new_row(1, 70, PROMPT, [4, 2])], num_tokens=[6])
    second = begin(runner, 1, num_tokens=[5])
    third = begin(runner, 1, grown_rows=[1], num_new_blocks=[1], new_blocks=[9])
    inputs = [step.inputs for step in engine.steps]
    assert [each.token_ids_T.tolist() for each in inputs] == [PROMPT[:6], PROMPT[6:], [LAST_SAMPLED]]
    assert [each.context_lens_S.tolist() for each in inputs] == [[6], [11], [12]]
    assert [each.sampling_N.tolist() for each in inputs] == [[], [0], [0]]
    assert [each.output_positions_N.tolist() for each in inputs] == [[], [0], [1]]
    assert [each.only_decodes for each in inputs] == [False, False, True]
    assert [each.query_starts.tolist() for each in inputs] == [[0, 6], [0, 5], [0, 1]]
    assert [table_changes(each) for each in inputs] == [[(1, 0, 4), (1, 1, 2)], [], [(1, 2, 9)]]
    assert [len(each.new_rows) for each in inputs] == [1, 0, 0]
    assert not third.is_done
    for step, tokens in zip(engine.steps, [(), ([33],), ([34],)], strict=True):
        step.finish(*tokens)
    results = [each.result() for each in (first, second, third)]
    assert [said(each).sequences for each in results] == [[], [70], [70]]
    assert [said(each).positions for each in results] == [[], [0], [1]]
    assert [said(each).token_ids for each in results] == [[], [33], [34]]
    assert results[0].timing.forward == 0.25
    begin(runner, 1)
    assert engine.steps[-1].inputs.context_lens_S.tolist() == [13]


def test_a_row_may_be_anothers_before_its_last_result_is_there(runner: GpuRunner, engine: HeldEngine):
    first = begin(runner, 0, new=[new_row(0, 1, PROMPT, [1, 2])], num_tokens=[11])
    # The sequence was cancelled; a longer one takes its row and one of its blocks.
    second = begin(runner, 0, new=[new_row(0, 2, [*PROMPT, 3], [2, 3])], num_tokens=[12], freed_rows=[0])
    inputs = engine.steps[1].inputs
    assert list(inputs.freed_rows) == [0]
    assert inputs.token_ids_T.tolist() == [*PROMPT, 3]
    assert table_changes(inputs) == [(0, 0, 2), (0, 1, 3)]
    engine.steps[1].finish([8])
    engine.steps[0].finish([7])
    assert said(first.result()).sequences == [1]
    assert said(second.result()).sequences == [2]


def test_how_a_new_row_samples_is_resolved(runner: GpuRunner, engine: HeldEngine):
    sampling = SamplingParams(
        temperature=0.5,
        top_p=0.75,
        top_k=9,
        min_p=0.25,
        seed=2**63 + 1,
        logprobs=3,
        min_tokens=4,
        repetition_penalty=1.5,
        logit_bias={8: -1.5, 3: 2.0},
        stop_token_ids=[9],
    )
    row = new_row(2, 1, [*PROMPT, 40], [1, 2], sampling, num_prompt_tokens=11, choice=6)
    begin(runner, 2, new=[row, new_row(3, 2, [7], [3])], num_tokens=[12])
    given, plain = engine.steps[0].inputs.new_rows
    assert (given.row, given.temperature, given.top_k, given.top_p, given.min_p) == (2, 0.5, 9, 0.75, 0.25)
    assert (given.seed, given.choice, given.num_logprobs) == (2**63 + 1, 6, 3)
    bias, penalties, min_tokens = given.adjustments
    assert isinstance(bias, Bias)
    assert isinstance(penalties, Penalties)
    assert isinstance(min_tokens, MinTokens)
    assert (bias.token_ids.tolist(), bias.bias.tolist()) == ([3, 8], [2.0, -1.5])
    assert (penalties.repetition, min_tokens.min_tokens) == (1.5, 4)
    assert (penalties.prompt_token_ids.tolist(), penalties.output_token_ids.tolist()) == (PROMPT, [40])
    assert min_tokens.banned_token_ids.tolist() == [2, 9]
    assert (plain.row, plain.temperature, plain.top_k, plain.top_p) == (3, 0.0, 0, 1.0)
    assert (plain.num_logprobs, plain.adjustments) == (None, ())


def test_a_failed_sequence_has_failed_in_all_its_results_and_its_row_is_sound(runner: GpuRunner, engine: HeldEngine):
    rows = [new_row(0, 1, PROMPT, [1, 2]), new_row(1, 2, PROMPT, [3, 4])]
    first = begin(runner, 0, 1, new=rows, num_tokens=[11, 11])
    second = begin(runner, 0, 1)
    third = begin(runner, 0, 1, new=[new_row(0, 3, PROMPT, [1, 2])], num_tokens=[11, 1], freed_rows=[0])
    engine.steps[0].finish([-1], [8])
    # Later outputs of the failed row do not matter.
    engine.steps[1].finish([6], [9])
    engine.steps[2].finish([5], [10])
    results = [each.result() for each in (first, second, third)]
    assert [list(each.failed_sequences) for each in results] == [[1], [1], []]
    assert [said(each).sequences for each in results] == [[2], [2], [3, 2]]
    assert [said(each).token_ids for each in results] == [[8], [9], [5, 10]]
    # The runner has forgotten it.
    assert not runner._failed_sequences


def test_a_row_with_drafts_waits_for_its_result(runner: GpuRunner, engine: HeldEngine):
    rows = [new_row(0, 1, PROMPT, [1, 2]), new_row(1, 2, PROMPT, [3, 4])]
    first = begin(runner, 0, 1, new=rows, num_tokens=[11, 11])
    engine.steps[0].finish([30], [31])
    first.result()
    drafted = begin(runner, 0, **drafting({1: [50, 51, 52]}))
    inputs = engine.steps[1].inputs
    assert inputs.token_ids_T.tolist() == [LAST_SAMPLED, LAST_SAMPLED, 50, 51, 52]
    assert inputs.num_drafts_N is not None
    assert inputs.num_drafts_N.tolist() == [0, 3]
    assert inputs.output_positions_N.tolist() == [1, 1]
    assert inputs.context_lens_S.tolist() == [12, 15]
    # The other row may go on meanwhile.
    other = begin(runner, 0)
    engine.steps[1].finish([32], [50, 60])
    engine.steps[2].finish([33])
    result = said(drafted.result())
    assert (result.sequences, result.positions, result.num_tokens) == ([1, 2], [1, 1], [1, 2])
    assert result.token_ids == [32, 50, 60]
    assert said(other.result()).positions == [2]
    # Two of the four computed tokens count: the sampled one and one draft.
    begin(runner, 1)
    assert engine.steps[3].inputs.context_lens_S.tolist() == [14]
    assert engine.steps[3].inputs.output_positions_N.tolist() == [3]
    assert engine.steps[3].inputs.token_ids_T.tolist() == [LAST_SAMPLED]


@pytest.mark.parametrize("fields", [{"decode_rows": decodes(0)}, {"rows": [0], "num_tokens": [1]}])
def test_planning_a_row_before_its_drafts_are_settled_is_refused(runner: GpuRunner, engine: HeldEngine, fields: dict):
    begin(runner, 0, new=[new_row(0, 1, PROMPT, [1, 2])], num_tokens=[11])
    engine.steps[0].finish([30])
    begin(runner, **drafting({0: [50, 51]}))
    with pytest.raises(PlanError, match="row 0 is named in step 7, but an earlier step with drafts of that row"):
        runner.begin(step_pb2.StepPlan(step=7, **fields))
    assert len(engine.steps) == 2


def test_a_row_that_is_freed_with_drafts_under_way_may_be_filled_at_once(runner: GpuRunner, engine: HeldEngine):
    first = begin(runner, 0, new=[new_row(0, 1, PROMPT, [1, 2])], num_tokens=[11])
    second = begin(runner, **drafting({0: [50, 51]}))
    third = begin(runner, 0, new=[new_row(0, 2, PROMPT[:4], [3])], num_tokens=[4], freed_rows=[0])
    for step, tokens in zip(engine.steps, ([30], [50, 51, 52], [40]), strict=True):
        step.finish(tokens)
    assert [said(each.result()).sequences for each in (first, second, third)] == [[1], [1], [2]]
    begin(runner, 0)
    # The old sequence's drafts do not affect it.
    assert engine.steps[3].inputs.context_lens_S.tolist() == [5]


def entries(positions: list[int], num_top: int) -> Logprobs:
    """Logprobs whose numbers encode the position."""
    places = np.array(positions, np.float32)
    top = np.arange(num_top)
    return Logprobs(
        positions=np.array(positions, np.int64),
        chosen=-places,
        ranks=np.array(positions, np.int64) + 1,
        top_ids_K=(10 * np.array(positions)[:, None] + top).astype(np.int64),
        top_K=(-places[:, None] - top).astype(np.float32),
    )


def test_logprobs_are_those_of_what_was_said_and_as_many_as_each_asked_for(runner: GpuRunner, engine: HeldEngine):
    wants = [SamplingParams(logprobs=1), GREEDY, SamplingParams(logprobs=0)]
    rows = [new_row(i, i + 1, PROMPT, [2 * i + 1, 2 * i + 2], each) for i, each in enumerate(wants)]
    first = begin(runner, 0, 1, 2, new=rows, num_tokens=[11, 11, 11])
    engine.steps[0].finish([30], [31], [-1], logprobs=entries([0, 2], 2))
    logprobs = first.result().logprobs
    assert [(each.chosen.token_id, each.chosen.logprob, each.chosen.rank) for each in logprobs] == [(30, 0.0, 1)]
    # Row 0 has one of two drafts accepted: scored positions 1, 2 and 3 belong to it, position 0 to row 1.
    drafted = begin(runner, 1, **drafting({0: [50, 51]}))
    engine.steps[1].finish([32], [50, 60], logprobs=entries([1, 2, 3], 2))
    logprobs = drafted.result().logprobs
    assert [(each.chosen.token_id, each.chosen.logprob) for each in logprobs] == [(50, -1.0), (60, -2.0)]
    assert [[(top.token_id, top.rank) for top in each.top] for each in logprobs] == [[(10, 1)], [(20, 1)]]


def test_prompt_logprobs_are_asked_for_all_rows_at_once(runner: GpuRunner, engine: HeldEngine):
    sampling = [SamplingParams(prompt_logprobs=count) for count in (0, 2)]
    rows = [new_row(0, 1, PROMPT, [1, 2], sampling[0]), new_row(1, 2, PROMPT[:3], [3], sampling[1])]
    result = begin(runner, 0, 1, new=rows, num_tokens=[4, 3])
    scores = engine.steps[0].inputs.prompt_scores
    assert scores is not None
    assert (scores.tokens_P.tolist(), scores.num_top) == ([0, 1, 2, 3, 4, 5], 2)
    assert scores.targets_P.tolist() == [*PROMPT[1:5], *PROMPT[1:3]]
    engine.steps[0].finish([30], prompts=entries(list(range(6)), 2))
    frames = [(each.sequence, each.frame) for each in result.result().prompt_logprobs]
    assert [(sequence, frame.first_position) for sequence, frame in frames] == [(1, 1), (2, 1)]
    assert [each.chosen.token_id for _, frame in frames for each in frame.logprobs] == scores.targets_P.tolist()
    assert [each.chosen.logprob for _, frame in frames for each in frame.logprobs] == [0, -1, -2, -3, -4, -5]
    assert [len(each.top) for _, frame in frames for each in frame.logprobs] == [0, 0, 0, 0, 2, 2]
    # The last chunk adds six; what follows its last token is sampled.
    begin(runner, 0, num_tokens=[7])
    scores = engine.steps[1].inputs.prompt_scores
    assert scores is not None
    assert scores.targets_P.tolist() == PROMPT[5:]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"decode_rows": decodes(3)}, "rows: row 3 holds no sequence"),
        ({"rows": [0], "num_tokens": [2]}, "num_tokens: row 0 would have 13 tokens computed; tokens known: 12"),
        ({"decode_rows": decodes(0), "swap_out_blocks": [1], "swap_out_host_blocks": [2]}, "swap_out_host_blocks: 2"),
        ({"decode_rows": decodes(0), "freed_rows": [9]}, "freed_rows: row 9 does not exist"),
    ],
)
def test_a_wrong_plan_is_refused_before_the_device_hears_of_it(
    runner: GpuRunner, engine: HeldEngine, fields: dict, message: str
):
    first = begin(runner, 0, new=[new_row(0, 1, PROMPT, [1, 2])], num_tokens=[11])
    with pytest.raises(PlanError, match=message):
        runner.begin(step_pb2.StepPlan(**fields))
    assert len(engine.steps) == 1
    # The step before it is not affected.
    engine.steps[0].finish([30])
    assert said(first.result()).token_ids == [30]


def test_more_steps_than_may_be_in_flight_are_refused(runner: GpuRunner, engine: HeldEngine):
    first = begin(runner, 0, new=[new_row(0, 1, PROMPT, [1, 2])], num_tokens=[11])
    begin(runner, 0)
    begin(runner, 0)
    engine.steps[0].finish([30])
    with pytest.raises(PlanError, match="3 results are awaited; max_steps_in_flight is 3"):
        begin(runner, 0)
    first.result()
    begin(runner, 0)


def test_reset_forgets_rows_and_what_was_under_way(runner: GpuRunner, engine: HeldEngine):
    rows = [new_row(0, 1, PROMPT, [1, 2]), new_row(1, 2, PROMPT, [3, 4])]
    first = begin(runner, 0, 1, new=rows, num_tokens=[11, 11])
    engine.steps[0].finish([-1], [9])
    first.result()
    begin(runner, **drafting({1: [50]}))
    runner.reset()
    assert engine.num_resets == 1
    assert runner.num_live_rows == 0
    again = begin(runner, 0, 1, new=rows, num_tokens=[11, 11])
    engine.steps[2].finish([8], [9])
    result = again.result()
    assert (said(result).sequences, list(result.failed_sequences)) == ([1, 2], [])


def test_a_call_comes_when_a_step_is_done(runner: GpuRunner, engine: HeldEngine):
    calls = [threading.Event(), threading.Event()]
    results = [begin(runner, 0, new=[new_row(0, 1, PROMPT, [1, 2])], num_tokens=[11]), begin(runner, 0)]
    for result, call in zip(results, calls, strict=True):
        result.call_when_done(call.set)
    engine.steps[0].finish([30])
    assert calls[0].wait(60)
    assert results[0].is_done
    assert not calls[1].is_set()
    engine.steps[1].finish([31])
    assert calls[1].wait(60)
