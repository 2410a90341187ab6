"""repetition_detection: outputs that repeat a pattern end, by vLLM's definition."""

from array import array
from itertools import pairwise
from random import Random

import pytest

from scheduler.core.messages import ChoiceStart, FinishReason, RepetitionRule, StopRules
from scheduler.core.state.endings import RepetitionWatch
from tests.fakes.model import repeats_itself
from tests.support.scheduler.core import CoreDriver, make_request

RULES = [
    RepetitionRule(min_pattern_size=1, max_pattern_size=1, min_count=2),
    RepetitionRule(min_pattern_size=1, max_pattern_size=4, min_count=3),
    RepetitionRule(min_pattern_size=3, max_pattern_size=7, min_count=2),
    RepetitionRule(min_pattern_size=2, max_pattern_size=1024, min_count=5),
]


@pytest.mark.parametrize("rule", RULES)
def test_each_token_is_judged_as_the_definition_says(rule: RepetitionRule) -> None:
    """Looked at token by token, by leaps, and for the first time at any length."""
    choose, output = Random(1), array("i")
    every, some = RepetitionWatch(rule), RepetitionWatch(rule)
    num_repeating = 0
    for _ in range(300):
        # Patterns that come again and again, and are interrupted.
        output.append(output[-choose.randint(1, min(6, len(output)))] if output and choose.random() < 0.8 else 9)
        expected = repeats_itself(output.tolist(), rule)
        assert every.is_repeating(output) == expected
        # A second look changes nothing.
        assert every.is_repeating(output) == expected
        assert RepetitionWatch(rule).is_repeating(output) == expected
        if choose.random() < 0.3:
            assert some.is_repeating(output) == expected
        num_repeating += expected
    assert num_repeating > 2


def test_an_output_of_one_token_is_noticed_at_once() -> None:
    watch, output = RepetitionWatch(RULES[1]), array("i")
    seen = []
    for _ in range(4):
        output.append(5)
        seen.append(watch.is_repeating(output))
    assert seen == [False, False, True, True]


def test_a_resume_of_an_output_that_repeats_itself_ends_at_once() -> None:
    driver = CoreDriver()
    rules = StopRules(max_tokens=20, repetition=RULES[1])
    starts = [ChoiceStart(choice=i, output_token_ids=tokens) for i, tokens in enumerate([(1, 5, 5, 5), (5, 5, 5, 1)])]
    driver.submit(make_request(1, [1], stop=rules, choices=starts))
    assert driver.ends[1, 0].reason is FinishReason.REPETITION
    assert (1, 1) not in driver.ends
    driver.finish()


def test_min_tokens_come_first_and_max_tokens_too() -> None:
    tokens = tuple([5] * 6)
    for rules, reason in (
        (StopRules(max_tokens=20, min_tokens=7, repetition=RULES[1]), None),
        (StopRules(max_tokens=6, repetition=RULES[1]), FinishReason.LENGTH),
        (StopRules(max_tokens=20, stop_token_ids=frozenset({5}), repetition=RULES[1]), FinishReason.STOP),
        (StopRules(max_tokens=20, min_tokens=6, repetition=RULES[1]), FinishReason.REPETITION),
    ):
        driver = CoreDriver()
        driver.submit(make_request(1, [1], stop=rules, choices=[ChoiceStart(choice=0, output_token_ids=tokens)]))
        end = driver.ends.get((1, 0))
        assert (end and end.reason) == reason


def test_a_pattern_that_is_too_long_to_fit_is_none() -> None:
    rule = RepetitionRule(min_pattern_size=3, max_pattern_size=3, min_count=4)
    output = array("i", [1, 2, 3] * 4)
    found = [RepetitionWatch(rule).is_repeating(output[:end]) for end in range(1, 13)]
    assert found == [False] * 11 + [True]
    assert all(not early or late for early, late in pairwise(found))
