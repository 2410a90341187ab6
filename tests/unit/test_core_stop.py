"""When a sequence ends, and what it says then."""

import pytest

from scheduler.core import Core
from scheduler.messages import ChoiceStart, FinishReason, Plan, Result, Sampled, SequenceOutput, StopRules
from tests.support.core import CoreDriver, make_request, make_settings

EOS, OWN = 7, 9


def say(rules: StopRules, tokens: list[int], **settings: object) -> list[SequenceOutput]:
    """The outputs of a request that the workers give these tokens, until it ends."""
    core = Core(make_settings(eos_token_ids=frozenset({EOS}), **settings))
    assert core.submit(make_request(1, [1, 2], stop=rules), 0.0) is None
    outputs: list[SequenceOutput] = []
    for position, token_id in enumerate(tokens):
        plan = core.schedule(0.0)
        if plan is None:
            break
        sampled = Sampled(sequence=1, position=position, token_id=token_id, logprobs=("of", token_id))
        outputs += core.apply(plan, Result(sampled=[sampled]), 0.0)
    core.check_integrity()
    return outputs


@pytest.mark.parametrize(
    ("rules", "tokens", "num_tokens", "reason", "stop_token_id"),
    [
        (StopRules(max_tokens=5), [1, EOS, 1], 2, FinishReason.STOP, None),
        (StopRules(max_tokens=3), [1, 1, 1, 1], 3, FinishReason.LENGTH, None),
        (StopRules(max_tokens=2), [1, EOS], 2, FinishReason.STOP, None),
        (StopRules(max_tokens=4, ignore_eos=True), [EOS] * 5, 4, FinishReason.LENGTH, None),
        (StopRules(max_tokens=5, stop_token_ids=frozenset({OWN})), [1, OWN, 1], 2, FinishReason.STOP, OWN),
        (
            StopRules(max_tokens=5, stop_token_ids=frozenset({EOS}), ignore_eos=True),
            [1, EOS],
            2,
            FinishReason.STOP,
            EOS,
        ),
        (StopRules(max_tokens=5, min_tokens=3), [EOS, EOS, EOS, 1], 3, FinishReason.STOP, None),
        (StopRules(max_tokens=2, min_tokens=2), [EOS, 1, 1], 2, FinishReason.LENGTH, None),
    ],
)
def test_stop_rules(
    rules: StopRules, tokens: list[int], num_tokens: int, reason: FinishReason, stop_token_id: int | None
):
    outputs = say(rules, tokens)
    assert [output.token_ids for output in outputs] == [[token] for token in tokens[:num_tokens]]
    assert [output.first_token for output in outputs] == list(range(num_tokens))
    assert [output.logprobs for output in outputs] == [[("of", token)] for token in tokens[:num_tokens]]
    assert [output.finish_reason for output in outputs] == [None] * (num_tokens - 1) + [reason]
    assert outputs[-1].stop_token_id == stop_token_id


def test_max_model_len_is_reached_and_not_passed():
    outputs = say(StopRules(max_tokens=8), [1] * 20, max_model_len=10)
    assert len(outputs) == 8
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def run_one() -> tuple[CoreDriver, Plan, Result]:
    driver = CoreDriver()
    driver.submit(make_request(1, [1, 2]))
    driver.submit(make_request(2, [3, 4]))
    step = driver.schedule()
    assert step is not None
    return driver, *step


def test_one_that_fails_ends_with_an_error_and_the_others_go_on():
    driver, plan, result = run_one()
    number = plan.new_rows[0].sequence
    driver.apply(plan, Result(sampled=result.sampled, failed=frozenset({number, 999})))
    assert driver.reason(1) is FinishReason.ERROR
    assert driver.tokens[1, 0] == []
    assert "not finite" in driver.ends[1, 0].message
    driver.finish()
    assert driver.reason(2) is FinishReason.LENGTH


def test_results_that_name_nobody_or_another_position_are_ignored():
    driver, plan, result = run_one()
    first, second = result.sampled
    stray = [
        Sampled(sequence=999, position=0, token_id=1),
        Sampled(sequence=first.sequence, position=1, token_id=1),
        first,
        first,
        second,
    ]
    outputs = driver.apply(plan, Result(sampled=stray))
    assert [output.token_ids for output in outputs] == [[first.token_id], [second.token_id]]
    driver.finish()


def test_a_sequence_that_the_workers_forgot_ends_with_an_error():
    """It would wait for ever otherwise: the workers believe it is further than the core does."""
    driver, plan, result = run_one()
    driver.apply(plan, Result(sampled=result.sampled[1:]))
    assert driver.reason(1) is FinishReason.ERROR
    assert "no token" in driver.ends[1, 0].message
    driver.finish()
    assert driver.reason(2) is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("output", "reason"),
    [((1, 2, 3), FinishReason.LENGTH), ((1, OWN), FinishReason.STOP), ((OWN, 1), None)],
)
def test_a_resumed_choice_that_has_ended_already_ends_at_once(output: tuple[int, ...], reason: FinishReason | None):
    driver = CoreDriver()
    rules = StopRules(max_tokens=3, stop_token_ids=frozenset({OWN}))
    starts = [ChoiceStart(choice=0, output_token_ids=output), ChoiceStart(choice=4)]
    driver.submit(make_request(1, [1], stop=rules, choices=starts))
    end = driver.ends.get((1, 0))
    assert (end and end.finish_reason) == reason
    if end:
        assert (end.token_ids, end.first_token) == ([], len(output))
    driver.finish()
    assert driver.reason(1, 4) is not None


def test_a_resume_of_which_nothing_is_left_is_no_work():
    driver = CoreDriver()
    driver.submit(make_request(1, [1], max_tokens=1, choices=[ChoiceStart(choice=0, output_token_ids=(5,))]))
    assert driver.reason(1) is FinishReason.LENGTH
    assert not driver.core.has_work
    assert driver.core.load.num_queued_tokens == 0
