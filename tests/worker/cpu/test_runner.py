"""The runner over a model without weights, whose logits depend on every token that attention should see."""

from typing import Any

import numpy as np
import pytest
import torch

from kernels.sampling.reference import draw_reference
from protos import step_pb2
from protos.inference_pb2 import SamplingParams
from runtime.wire import PROMPT_LOGPROBS_FRAME_BYTES
from tests.fakes.fake_model import POISON, logits_after
from tests.fakes.fake_runner import fake_runner
from tests.support.scheduler.steps import decodes, drafting, said
from worker.cpu.runner import Runner
from worker.sampling.logprobs import frames, token_logprobs
from worker.sampling.uniforms import uniforms

GREEDY = SamplingParams(temperature=0.0)
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]


def new_row(row: int, sequence: int, tokens: list[int], blocks: list[int], sampling=GREEDY, **fields):
    fields = {"num_prompt_tokens": len(tokens), **fields}
    return step_pb2.NewRow(row=row, sequence=sequence, token_ids=tokens, block_ids=blocks, sampling=sampling, **fields)


def execute(runner: Runner, new=(), rows=(0,), num_tokens=(1,), **fields) -> step_pb2.StepResult:
    return runner.execute(step_pb2.StepPlan(epoch=3, step=9, new_rows=new, rows=rows, num_tokens=num_tokens, **fields))


def decode(runner: Runner, count: int, row: int = 0) -> list[int]:
    steps = (execute(runner, rows=(), num_tokens=(), decode_rows=decodes(row)) for _ in range(count))
    return [said(result).token_ids[0] for result in steps]


def greedy_continuation(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_after(tokens).argmax()))
    return tokens[len(prompt) :]


def test_greedy_output_is_that_of_the_model():
    runner = fake_runner()
    result = execute(runner, [new_row(0, 77, PROMPT, [4, 2, 9])], num_tokens=[11])
    assert (result.epoch, result.step) == (3, 9)
    assert (said(result).sequences, said(result).positions) == ([77], [0])
    assert [*said(result).token_ids, *decode(runner, 9)] == greedy_continuation(PROMPT, 10)
    assert result.timing.total >= result.timing.forward + result.timing.sample > 0


def test_output_is_the_same_chunked_batched_and_computed_again():
    params = SamplingParams(temperature=1.0, top_p=0.95, seed=11, repetition_penalty=1.2)
    alone = fake_runner()
    first = execute(alone, [new_row(0, 1, PROMPT, [1, 2, 3], params)], num_tokens=[11])
    expected = [*said(first).token_ids, *decode(alone, 8)]

    batched = fake_runner()
    other = new_row(5, 2, [50, 51], [20, 21], SamplingParams(temperature=2.0, seed=3))
    assert not execute(batched, [other], rows=[5], num_tokens=[1]).token_ids
    execute(batched, [new_row(0, 1, PROMPT, [9, 8, 7], params)], rows=[5, 0], num_tokens=[1, 4])
    execute(batched, rows=[0, 5], num_tokens=[5, 1])
    result = execute(batched, rows=[5, 0], num_tokens=[1, 2])
    assert said(result).sequences == [2, 1]
    got = [said(result).token_ids[1]]
    for _ in range(4):
        result = execute(batched, rows=[0, 5], num_tokens=[1, 1])
        got.append(said(result).token_ids[0])
    # Preempted, and back in another row and other blocks with its five tokens, in two chunks.
    back = new_row(3, 6, [*PROMPT, *got], [30, 31, 32], params, num_prompt_tokens=11)
    assert not execute(batched, [back], rows=[3], num_tokens=[10], freed_rows=[0]).token_ids
    result = execute(batched, rows=[3], num_tokens=[6])
    assert (said(result).sequences, said(result).positions) == ([6], [5])
    got += [*said(result).token_ids, *decode(batched, 3, row=3)]
    assert got == expected


def test_a_prefix_computed_by_another_row_is_read():
    runner = fake_runner()
    execute(runner, [new_row(0, 1, PROMPT, [4, 2])], num_tokens=[11])
    tokens = [*PROMPT[:8], 60, 61]
    result = execute(runner, [new_row(1, 2, tokens, [4, 5], num_computed_tokens=8)], rows=[1], num_tokens=[2])
    assert said(result).token_ids == greedy_continuation(tokens, 1)


def test_the_draw_uses_seed_choice_and_position():
    runner = fake_runner()
    result = execute(
        runner, [new_row(0, 1, PROMPT, [1, 2], SamplingParams(temperature=1.0, seed=99), choice=2)], num_tokens=[11]
    )
    uniform = uniforms(np.array([99], np.uint64), np.array([2]), np.array([0]))[0]
    expected = draw_reference(logits_after(PROMPT), temperature=1.0, uniform=uniform)
    assert said(result).token_ids == [expected]


def test_logits_are_kept_only_in_steps_that_need_them(monkeypatch: pytest.MonkeyPatch):
    runner = fake_runner()
    asked: list[int] = []
    logits = runner._model.logits

    def counted(hidden_SE: torch.Tensor) -> torch.Tensor:
        asked.append(len(hidden_SE))
        return logits(hidden_SE)

    monkeypatch.setattr(runner._model, "logits", counted)
    greedy_rows = [new_row(0, 1, PROMPT, [1, 2]), new_row(1, 2, PROMPT[:5], [3, 4])]
    execute(runner, greedy_rows, rows=[0, 1], num_tokens=[11, 5])
    drafted = execute(runner, rows=[], num_tokens=[], **drafting({0: [1, 2]}))
    assert drafted.token_ids
    assert not asked
    sampled = new_row(2, 3, PROMPT, [5, 6], SamplingParams(temperature=1.0, seed=1))
    result = execute(runner, [sampled], rows=[1, 2], num_tokens=[1, 11])
    assert asked == [2]
    # Beside a row that draws, a greedy row samples what it samples alone.
    assert said(result).token_ids[0] == greedy_continuation(PROMPT[:5], 2)[1]


def test_a_failed_row_harms_nobody_and_may_be_planned_once_more():
    runner = fake_runner()
    good, bad = new_row(0, 1, PROMPT, [1, 2, 3]), new_row(1, 2, [3, POISON], [4, 5], SamplingParams(logprobs=1))
    result = execute(runner, [good, bad], rows=[1, 0], num_tokens=[2, 11])
    assert list(result.failed_sequences) == [2]
    assert (said(result).sequences, said(result).token_ids) == ([1], greedy_continuation(PROMPT, 1))
    assert not result.logprobs
    # This plan was made before that result was known.
    result = execute(runner, rows=[1, 0], num_tokens=[1, 1])
    assert list(result.failed_sequences) == [2]
    assert said(result).sequences == [1]


def test_blocks_of_a_failed_row_are_zeroed_before_others_get_them():
    runner = fake_runner()
    execute(runner, [new_row(0, 1, [3, POISON], [4])], num_tokens=[2])
    cache = runner._kv_cache.layers[0]
    cache[4] = float("nan")
    # The new owner writes 3 tokens into the block of 8.
    execute(runner, [new_row(1, 2, [5, 6, 7], [4])], rows=[1], num_tokens=[3], freed_rows=[0])
    assert torch.isfinite(cache).all()


def test_prompt_logprobs_of_chunks_join_without_gap():
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=2, logprobs=0)
    runner = fake_runner()
    results = [
        execute(runner, [new_row(0, 4, PROMPT, [1, 2], sampling)], num_tokens=[4]),
        execute(runner, num_tokens=[6]),
        execute(runner, num_tokens=[1]),
        execute(runner, num_tokens=[1]),
    ]
    scored = [frame for result in results for frame in result.prompt_logprobs]
    assert [(part.sequence, part.frame.first_position) for part in scored] == [(4, 1), (4, 5)]
    entries = [entry for part in scored for entry in part.frame.logprobs]
    assert [entry.chosen.token_id for entry in entries] == PROMPT[1:]
    for position, entry in enumerate(entries, 1):
        own = torch.log_softmax(logits_after(PROMPT[:position]), -1)
        assert abs(entry.chosen.logprob - float(own[PROMPT[position]])) < 1e-5
        assert [top.token_id for top in entry.top] == own.topk(2).indices.tolist()
    # Sampled rows with logprobs=0 get only the chosen token's.
    assert [len(result.logprobs) for result in results] == [0, 0, 1, 1]
    assert not results[2].logprobs[0].top


def test_prompt_logprobs_are_not_computed_again_on_a_return_with_output():
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=2)
    runner = fake_runner()
    result = execute(runner, [new_row(0, 4, PROMPT, [1, 2], sampling, num_prompt_tokens=10)], num_tokens=[11])
    assert not result.prompt_logprobs


def test_long_prompt_logprobs_come_in_frames_within_the_bound():
    logits = torch.randn(1500, 200, generator=torch.Generator().manual_seed(0))
    entries = [token_logprobs(logits_V, i % 200, 20) for i, logits_V in enumerate(logits.numpy())]
    parts = list(frames(7, entries))
    assert len(parts) > 1
    position = 7
    for part in parts:
        assert part.first_position == position
        position += len(part.logprobs)
        # The router adds the tokens' bytes: 24 for each.
        assert part.ByteSize() + 24 * 21 * len(part.logprobs) < PROMPT_LOGPROBS_FRAME_BYTES
    assert position == 7 + 1500


def test_warm_up_goes_through_the_real_step_and_leaves_nothing():
    every_size: list[dict[str, Any]] = [
        {},
        {"max_model_len": 2, "num_blocks": 1},
        {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    ]
    for sizes in every_size:
        runner = fake_runner(**sizes)
        runner.warm_up()
        assert runner.num_live_rows == 0


def test_reset_forgets_every_row():
    runner = fake_runner()
    execute(runner, [new_row(0, 1, PROMPT, [1, 2])], num_tokens=[11])
    runner.reset()
    assert runner.num_live_rows == 0
    result = execute(runner, [new_row(0, 1, PROMPT, [3, 4])], num_tokens=[11])
    assert said(result).token_ids == greedy_continuation(PROMPT, 1)
