"""The CPU and the GPU runner give the same results for the same plans. The GPU's engine and kernels are interpreted."""

from collections import deque
from collections.abc import Iterable
from typing import Any, Literal

import pytest

from configs.options import Options
from octavo.local.engine import Engine
from protos import inference_pb2, step_pb2
from protos.inference_pb2 import SamplingParams, TokenIds
from tests.fakes.fake_model import POISON, logits_after
from tests.fakes.fake_runner import fake_runner
from tests.fakes.gpu.fake_gpu_runner import fake_gpu_runner
from tests.support.scheduler.steps import decodes, drafting
from worker.cpu.runner import Runner
from worker.step.runner import DoneResult

# For float32 logprobs: the two runners sum over the vocabulary in different orders.
LOGPROB_TOLERANCE = 1e-4
REQUESTS = [
    ([3, 4, 5], SamplingParams(temperature=0.0, logprobs=2, n=2)),
    ([7] * 20, SamplingParams(temperature=0.9, seed=5, top_p=0.8, repetition_penalty=1.3, frequency_penalty=0.5)),
    (list(range(10, 45)), SamplingParams(temperature=1.2, seed=6, prompt_logprobs=3, logprobs=0)),
    ([9, 8], SamplingParams(temperature=0.7, seed=7, top_k=5, min_p=0.05, min_tokens=6, logit_bias={50: 3.0}, n=2)),
    ([40, POISON, 41], SamplingParams(temperature=0.5, seed=8, logprobs=1)),
    ([60, 61, 62, 63], SamplingParams(temperature=0.0)),
    (
        [30, 31],
        SamplingParams(
            temperature=1.0,
            seed=9,
            n=2,
            allowed_token_ids=range(30, 34),
            logprobs=3,
            logprob_token_ids=[70, 9, 31],
            bad_word_token_ids=[TokenIds(ids=[31, 32]), TokenIds(ids=[33, 33]), TokenIds(ids=[30, 32, 30])],
        ),
    ),
]
STEPS_IN_FLIGHT = 2

Mode = Literal["recompute", "swap"]


def plain(result: step_pb2.StepResult) -> step_pb2.StepResult:
    """A copy without the parts that differ: times and logprob values."""
    same = step_pb2.StepResult()
    same.CopyFrom(result)
    same.ClearField("timing")
    for each in all_logprobs(same):
        for entry in (each.chosen, *each.top):
            entry.logprob = 0.0
    return same


def all_logprobs(result: step_pb2.StepResult) -> list[inference_pb2.TokenLogprobs]:
    return [*result.logprobs, *(entry for row in result.prompt_logprobs for entry in row.frame.logprobs)]


def assert_same(got: step_pb2.StepResult, expected: step_pb2.StepResult) -> None:
    assert plain(got) == plain(expected)
    for mine, its in zip(all_logprobs(got), all_logprobs(expected), strict=True):
        values = zip((mine.chosen, *mine.top), (its.chosen, *its.top), strict=True)
        assert all(abs(a.logprob - b.logprob) < LOGPROB_TOLERANCE for a, b in values)


def computed_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, mode: Mode, **sizes: Any
) -> list[tuple[step_pb2.StepPlan, step_pb2.StepResult]]:
    """All plans of REQUESTS and their results."""
    steps: list[tuple[step_pb2.StepPlan, step_pb2.StepResult]] = []
    begin = Runner.begin

    def recorded(runner: Runner, plan: step_pb2.StepPlan) -> DoneResult:
        pending = begin(runner, plan)
        steps.append((plan, pending.result()))
        return pending

    monkeypatch.setattr(Runner, "begin", recorded)
    options = Options(
        block_size=8,
        max_num_seqs=8,
        max_num_batched_tokens=sizes["max_num_batched_tokens"],
        preemption_mode=mode,
        max_steps_in_flight=STEPS_IN_FLIGHT,
    )
    engine = Engine(fake_runner(**sizes), options)
    for group, (prompt, sampling) in enumerate(REQUESTS):
        resolved = SamplingParams(max_tokens=6, n=1)
        resolved.MergeFrom(sampling)
        engine.submit(group, prompt, resolved)
    while engine.has_work:
        engine.step()
    assert engine.num_preemptions, "the cache was never short"
    return steps


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_plans_of_a_core_give_the_same_results_while_steps_overlap(monkeypatch: pytest.MonkeyPatch, mode: Mode):
    sizes = {"num_blocks": 10, "max_num_batched_tokens": 24, "num_swap_blocks": 16 if mode == "swap" else 0}
    steps = computed_on_a_cpu(monkeypatch, mode, **sizes)
    # The plans contain all the hard cases.
    plans = [plan for plan, _ in steps]
    assert any(plan.swap_in_blocks for plan in plans) == (mode == "swap")
    assert any(plan.freed_rows and plan.new_rows for plan in plans)
    assert any(result.failed_sequences for _, result in steps)
    runner = fake_gpu_runner(**sizes, max_steps_in_flight=STEPS_IN_FLIGHT)
    in_flight = deque()
    expected = deque(result for _, result in steps)
    for plan in plans:
        if len(in_flight) == STEPS_IN_FLIGHT:
            assert_same(in_flight.popleft().result(), expected.popleft())
        in_flight.append(runner.begin(plan))
    for pending in in_flight:
        assert_same(pending.result(), expected.popleft())


def test_drafts_are_verified_alike():
    sampling = SamplingParams(temperature=1.0, seed=3, presence_penalty=0.5, logprobs=1)
    prompts = [[5, 6, 7], [20, 21, 22, 23]]
    greedy = [int(logits_after(prompts[1]).argmax())]
    greedy.append(int(logits_after([*prompts[1], *greedy]).argmax()))
    rows = [
        step_pb2.NewRow(
            row=i,
            sequence=i + 1,
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            block_ids=[2 * i + 1, 2 * i + 2],
            sampling=each,
        )
        for i, (prompt, each) in enumerate(zip(prompts, (sampling, SamplingParams(temperature=0.0)), strict=True))
    ]
    plans = [
        step_pb2.StepPlan(new_rows=rows, rows=[0, 1], num_tokens=[3, 4]),
        # One row has a right and a wrong draft, the other row only a wrong one.
        step_pb2.StepPlan(**drafting({1: [greedy[1], 99], 0: [99]})),
        step_pb2.StepPlan(decode_rows=decodes(0), rows=[1], num_tokens=[1]),
        step_pb2.StepPlan(decode_rows=decodes(0, 1)),
    ]
    results = list(on_both(plans))
    assert [len(result.num_tokens) // 4 for result in results] == [0, 2, 0, 0]
    # Two tokens of the first row, one of the other.
    assert len(results[1].token_ids) // 4 == 3


def on_both(plans: Iterable[step_pb2.StepPlan]) -> Iterable[step_pb2.StepResult]:
    """Runs plans on both runners, asserts equal results and yields them."""
    cpu, gpu = fake_runner(), fake_gpu_runner()
    for plan in plans:
        result = cpu.execute(plan)
        assert_same(gpu.execute(plan), result)
        yield result


def test_warm_up_leaves_nothing():
    runner = fake_gpu_runner()
    runner.warm_up()
    assert runner.num_live_rows == 0
