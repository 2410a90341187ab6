"""The engine: a core and a runner in one loop. The fake model's output is a hash of what its attention reads."""

from typing import Any

import pytest

from configs.options import Options
from octavo.client.errors import InvalidRequest
from octavo.local.engine import Engine, build_engine
from protos import inference_pb2 as pb
from scheduler.core.messages import FinishReason
from tests.fakes.fake_model import POISON
from tests.fakes.fake_runner import fake_runner
from worker.cpu.runner import Runner
from worker.step.runner import DoneResult

PROMPTS = [[3, 4, 5], [7] * 20, list(range(10, 45)), [9, 8]]


def engine(*, num_blocks: int = 64, budget: int = 64, **changes: Any) -> Engine:
    options = Options(block_size=8, max_num_seqs=8, max_num_batched_tokens=budget, **changes)
    num_swap_blocks = 32 if options.preemption_mode == "swap" else 0
    runner = fake_runner(num_blocks=num_blocks, max_num_batched_tokens=budget, num_swap_blocks=num_swap_blocks)
    return Engine(runner, options)


def params(n: int = 1, max_tokens: int = 20, prompt_logprobs: int | None = None) -> pb.SamplingParams:
    return pb.SamplingParams(
        temperature=0.9,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        repetition_penalty=1.0,
        seed=5,
        n=n,
        max_tokens=max_tokens,
        prompt_logprobs=prompt_logprobs,
        logit_bias={POISON: -100.0},
    )


def run(made: Engine) -> dict[tuple[int, int], list[int]]:
    """Runs to the end. Returns all outputs, by group and choice."""
    outputs: dict[tuple[int, int], list[int]] = {}
    while made.has_work:
        for output in made.step().sequences:
            assert output.end is None or not output.end.message
            outputs.setdefault(output.key, []).extend(output.token_ids)
    return outputs


def together(made: Engine, n: int = 1) -> dict[tuple[int, int], list[int]]:
    for group, prompt in enumerate(PROMPTS):
        made.submit(group, prompt, params(n))
    return run(made)


def test_requests_give_the_same_alone_and_together() -> None:
    alone = {}
    for group, prompt in enumerate(PROMPTS):
        made = engine()
        made.submit(group, prompt, params(n=2))
        alone |= run(made)
    assert together(engine(), n=2) == alone
    assert alone[0, 0] != alone[0, 1]


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_small_budget_and_a_small_cache_change_nothing(mode: str, steps: int) -> None:
    tight = engine(num_blocks=8, budget=16, preemption_mode=mode, max_steps_in_flight=steps)
    assert together(tight, n=2) == together(engine(), n=2)
    assert tight.num_preemptions, "the cache was never short"


@pytest.mark.parametrize("steps", [1, 2])
def test_steps_that_should_be_short_change_no_output(steps: int) -> None:
    """So short that each computes only the few tokens that it computes in any case."""
    hurried = engine(inter_token_latency_target=0.001, max_steps_in_flight=steps)
    hurried.submit(9, [5] * 4, params(max_tokens=60))
    outputs = together(hurried, n=2)
    del outputs[9, 0]
    assert outputs == together(engine(), n=2)


def test_whole_prefills_and_steps_ahead_change_nothing() -> None:
    whole = engine(enable_chunked_prefill=False, max_steps_in_flight=3)
    assert together(whole, n=2) == together(engine(), n=2)


def test_steps_are_begun_ahead_of_the_results_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    begin, take = Runner.begin, DoneResult.result
    monkeypatch.setattr(Runner, "begin", lambda runner, plan: events.append("begin") or begin(runner, plan))
    monkeypatch.setattr(DoneResult, "result", lambda pending: events.append("take") or take(pending))
    made = engine(max_steps_in_flight=2)
    made.submit(1, PROMPTS[0], params(max_tokens=4))
    made.step()
    assert events == ["begin", "begin", "take"]
    run(made)
    assert events == ["begin", "begin", "take", "begin", "take", "begin", "take", "take"]


def test_what_a_cancel_leaves_in_flight_harms_nobody() -> None:
    made = engine(max_steps_in_flight=3)
    made.submit(1, PROMPTS[0], params(n=2))
    made.step()
    [end] = made.cancel(1, [1])
    assert (end.key, end.reason) == ((1, 1), FinishReason.CANCELLED)
    made.cancel(1)
    made.submit(2, PROMPTS[1], params())
    outputs = run(made)
    assert set(outputs) == {(2, 0)}
    alone = engine()
    alone.submit(2, PROMPTS[1], params())
    assert run(alone) == outputs


def test_a_cancelled_choice_says_no_more_and_the_others_go_on() -> None:
    made = engine()
    made.submit(1, PROMPTS[0], params(n=2))
    made.step()
    made.cancel(1, [0])
    assert {choice for _, choice in run(made)} == {1}


def test_prompt_logprobs_come_with_their_sequence() -> None:
    made = engine()
    made.submit(1, PROMPTS[2], params(prompt_logprobs=0))
    frames = made.step().prompt_logprobs
    assert [key for key, _ in frames] == [(1, 0)]
    assert [entry.chosen.token_id for entry in frames[0][1].logprobs] == PROMPTS[2][1:]


def test_what_can_never_fit_is_refused_with_the_reason() -> None:
    with pytest.raises(InvalidRequest, match="max_model_len=128"):
        engine().submit(1, PROMPTS[0], params(max_tokens=500))


def test_the_parts_of_a_steps_time_lie_within_it() -> None:
    made = engine()
    together(made)
    times = made.times
    assert 0 < times.scheduling + times.forward + times.sampling <= times.total


@pytest.mark.parametrize(("given", "steps"), [({}, 1), ({"max_steps_in_flight": 3}, 3)], ids=str)
def test_one_step_is_in_flight_in_one_process_unless_more_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], steps: int
) -> None:
    built: list[Options] = []

    def build_runner(options: Options, **_: object) -> Runner:
        built.append(options)
        return fake_runner(num_blocks=64)

    monkeypatch.setattr("worker.process.build.build_runner", build_runner)
    monkeypatch.setattr("worker.cpu.threads.prepare_threads", lambda options: ())
    made = build_engine(Options(block_size=8, data_parallel_size=2, **given))
    assert [(each.max_steps_in_flight, each.data_parallel_size) for each in built] == [(steps, 1)]
    assert len(together(made)) == len(PROMPTS)
