"""The engine: a core and a runner in one loop. The model is a hash of what its attention reads."""

import pytest

from configs.options import Options
from octavo.engine import Engine
from octavo.errors import InvalidRequest
from protos import inference_pb2 as pb
from tests.fakes.fake_model import POISON
from tests.fakes.fake_runner import fake_runner

PROMPTS = [[3, 4, 5], [7] * 20, list(range(10, 45)), [9, 8]]


def engine(*, num_blocks: int = 64, budget: int = 64) -> Engine:
    options = Options(block_size=8, max_num_seqs=8, max_num_batched_tokens=budget)
    return Engine(fake_runner(num_blocks=num_blocks, max_num_batched_tokens=budget), options)


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
    """All outputs, by group and choice."""
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


def test_a_small_budget_and_a_small_cache_change_nothing() -> None:
    tight = engine(num_blocks=8, budget=16)
    assert together(tight) == together(engine())
    assert tight.times.num_steps > 20, "the cache was never short"


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
