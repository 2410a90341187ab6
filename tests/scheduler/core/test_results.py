"""When a sequence ends, and with which reason and tokens."""

import dataclasses

import numpy as np
import pytest

from scheduler.core.core import Core
from scheduler.core.messages import ChoiceStart, FinishReason, Plan, Result, StepOutputs, StopRules
from tests.support.scheduler.core import CoreDriver, make_request, make_result, make_settings, tokens_of

EOS, OWN = 7, 9


def say(rules: StopRules, tokens: list[int], **settings: object) -> list[StepOutputs]:
    """The outputs of a request for which the workers sample these tokens, until it ends."""
    core = Core(make_settings(eos_token_ids=frozenset({EOS}), **settings))
    assert core.submit(make_request(1, [1, 2], stop=rules), 0.0) is None
    outputs: list[StepOutputs] = []
    for position, token_id in enumerate(tokens):
        plan = core.schedule(0.0)
        if plan is None:
            break
        result = make_result(plan.step, (1, position, token_id), logprobs={1: [("of", token_id)]})
        outputs.append(core.apply(result, 0.0))
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
    assert [tokens_of(output) for output in outputs] == [{(1, 0): [token]} for token in tokens[:num_tokens]]
    assert [output.first_tokens.tolist() for output in outputs] == [[i] for i in range(num_tokens)]
    assert [output.logprobs for output in outputs] == [{0: [("of", token)]} for token in tokens[:num_tokens]]
    assert [len(output.ends) for output in outputs] == [0] * (num_tokens - 1) + [1]
    (end,) = outputs[-1].ends
    assert (end.key, end.reason, end.stop_token_id) == ((1, 0), reason, stop_token_id)


def test_max_model_len_is_reached_and_not_passed():
    outputs = say(StopRules(max_tokens=8), [1] * 20, max_model_len=10)
    assert len(outputs) == 8
    assert outputs[-1].ends[0].reason is FinishReason.LENGTH


def run_one() -> tuple[CoreDriver, Plan, Result]:
    driver = CoreDriver()
    driver.submit(make_request(1, [1, 2]))
    driver.submit(make_request(2, [3, 4]))
    step = driver.schedule()
    assert step is not None
    return driver, *step


def entries_of(result: Result) -> list[tuple[int, int, int]]:
    return list(zip(result.sequences.tolist(), result.positions.tolist(), result.token_ids.tolist(), strict=True))


@pytest.mark.parametrize("is_told", [True, False])
def test_one_that_fails_ends_with_an_error_and_the_others_go_on(is_told: bool):
    """is_told: the columns contain a sample of the failed sequence, which must be ignored."""
    driver, plan, result = run_one()
    number = plan.new_rows[0].sequence
    entries = entries_of(result) if is_told else entries_of(result)[1:]
    driver.apply(make_result(plan.step, *entries, failed=frozenset({number, 999})))
    assert driver.reason(1) is FinishReason.ERROR
    assert driver.tokens[1, 0] == []
    assert "not finite" in driver.ends[1, 0].message
    driver.finish()
    assert driver.reason(2) is FinishReason.LENGTH


def test_results_that_name_nobody_or_another_position_are_ignored():
    driver, plan, result = run_one()
    first, second = entries_of(result)
    strays = [(999, 0, 1), (first[0], 1, 1), first, first, second]
    outputs = driver.apply(make_result(plan.step, *strays))
    assert tokens_of(outputs) == {(1, 0): [first[2]], (2, 0): [second[2]]}
    driver.finish()


@pytest.mark.parametrize("position", [None, 1])
def test_a_sequence_that_the_workers_forgot_ends_with_an_error(position: int | None):
    """Otherwise it would wait for ever: the workers are further with it than the core knows."""
    driver, plan, result = run_one()
    first, second = entries_of(result)
    entries = [second] if position is None else [(first[0], position, first[2]), second]
    driver.apply(make_result(plan.step, *entries))
    assert driver.reason(1) is FinishReason.ERROR
    assert "no token" in driver.ends[1, 0].message
    driver.finish()
    assert driver.reason(2) is FinishReason.LENGTH


def test_more_tokens_than_drafts_were_planned_are_an_error():
    driver, _, result = run_one()
    too_many = dataclasses.replace(
        result, num_tokens=np.array([2, 1], np.int32), token_ids=np.array([1, 1, 1], np.int32)
    )
    driver.apply(too_many)
    assert driver.reason(1) is FinishReason.ERROR
    assert "too many tokens" in driver.ends[1, 0].message
    assert len(driver.tokens[2, 0]) == 1


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
    assert (end and end.reason) == reason
    assert driver.tokens[1, 0] == list(output)
    driver.finish()
    assert driver.reason(1, 4) is not None


def test_a_resume_of_which_nothing_is_left_is_no_work():
    driver = CoreDriver()
    driver.submit(make_request(1, [1], max_tokens=1, choices=[ChoiceStart(choice=0, output_token_ids=(5,))]))
    assert driver.reason(1) is FinishReason.LENGTH
    assert not driver.core.has_work
    assert driver.core.load.num_queued_tokens == 0
