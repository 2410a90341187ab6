"""The constrained and tool-calling streams of benchmarks.faults, and what is seen to be wrong with an output."""

import dataclasses
from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.faults.crowd import Outcome, Plan, differences
from benchmarks.faults.traffics.structured import breaches, make_structured_plans
from octavo.client.requests import generate_request
from octavo.client.results import Choice, FinishReason, Generation, Usage
from octavo.client.tools import ToolCall
from router.parsing.deltas import call_id

PLANS = make_structured_plans(36, 1, max_tokens=100)
ARGUMENTS = '{"from": "Paris", "to": "Kraków", "by": ["bus"]}'
CALL = f'<tool_call>\n{{"name": "find_route", "arguments": {ARGUMENTS}}}\n</tool_call>'
CITY = (
    '{"name": "Paris", "number_of_inhabitants_at_the_last_census": 2, "continent": "Europe", '
    '"neighbours": [{"name": "Zürich", "distance_in_km": 490}], "motto": null}'
)


def test_all_kinds_come_and_half_are_sampled() -> None:
    assert set(Counter(plan.kind for plan in PLANS).values()) == {4}
    assert sum(plan.sampling.temperature != 0 for plan in PLANS) == 18
    assert sum(plan.has_seed for plan in PLANS) == 27
    assert {plan.sampling.n for plan in PLANS} == {1, 2, 3}
    assert {plan.options.get("parallel_tool_calls", True) for plan in PLANS} == {True, False}
    requests = [generate_request(plan.prompt, plan.sampling, plan.options) for plan in PLANS]
    assert len({request.request_id for request in requests}) == 36
    assert {bool(request.parse_output) for request in requests} == {True, False}


def plan_of(kind: str) -> Plan:
    plan = next(plan for plan in PLANS if plan.kind == kind)
    return replace(plan, sampling=replace(plan.sampling, n=1))


def outcome(kind: str, text: str, *calls: str, **changes) -> Outcome:
    """calls: their arguments."""
    plan = plan_of(kind)
    request_id = plan.options.get("request_id", "")
    ids = [call_id(request_id, 0, index) for index in range(len(calls))]
    choice = Choice(
        index=0,
        text=text,
        token_ids=(1, 2),
        logprobs=(),
        finish_reason=FinishReason.STOP,
        stop=None,
        exact=True,
        content="" if calls else text,
        tool_calls=tuple(ToolCall(id=i, name="find_route", arguments=each) for i, each in zip(ids, calls, strict=True)),
    )
    choice = dataclasses.replace(choice, **changes)
    generation = Generation(
        request_id="",
        model="",
        seed=5,
        prompt_token_ids=(7,),
        choices=(choice,),
        prompt_logprobs=(),
        usage=Usage(prompt_tokens=1, cached_tokens=0, completion_tokens=2),
        fingerprint="",
        num_resumes=0,
    )
    return Outcome(plan=plan, generation=generation, arrivals=[])


WHOLE = [
    outcome("json schema", CITY),
    outcome("json schema, behind text", f"A city.{CITY}"),
    outcome("regex", "2026-11-23 09:00, the main station in Paris."),
    outcome("choice", plan_of("choice").sampling.constraint.choice[1]),  # type: ignore[union-attr,index]
    outcome("grammar", "sum = 1*(2 - 3) + 4 + ((5 - 6) - 7) + 8 + 9"),
    outcome("tools, required", f"{CALL}\n{CALL}", ARGUMENTS, ARGUMENTS),
    outcome("tools, strict", CALL, ARGUMENTS),
    outcome("tools, strict", "I do not know."),
    outcome("json schema", CITY[:40], finish_reason=FinishReason.LENGTH),
]


@pytest.mark.parametrize("whole", WHOLE, ids=lambda each: each.plan.kind)
def test_nothing_is_wrong_with_what_was_asked_for(whole: Outcome) -> None:
    assert not breaches(whole)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (outcome("json schema", CITY[:-1]), "no JSON"),
        (outcome("json schema", CITY.replace("490", "-1")), "not valid: -1 is less"),
        (outcome("json schema, behind text", CITY.replace(".", "")), "it ends before '.'"),
        (outcome("regex", "2026-11-23 09:00"), "no match"),
        (outcome("choice", "There is"), "none of the texts"),
        (outcome("grammar", "sum = 1 +"), "no text of the grammar"),
        (outcome("json object", "[]"), "not valid: [] is not of type"),
        (outcome("tools, required", "No."), "it has no call"),
        (outcome("tools, strict", CALL.replace("Paris", "P" * 99), ARGUMENTS.replace("Paris", "P" * 99)), "too long"),
        (outcome("tools, strict", CALL, ARGUMENTS + ARGUMENTS), "other arguments than in its text"),
        (outcome("tools, strict", CALL, ARGUMENTS, ARGUMENTS), "the calls"),
        (outcome("tools, strict", CALL, ARGUMENTS, content="\n"), "other content than in its text"),
    ],
)
def test_it_sees_what_is_wrong_by_itself(wrong: Outcome, words: str) -> None:
    assert any(words in breach for breach in breaches(wrong)), breaches(wrong)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"content": "I do.I do."}, "another content"),
        ({"tool_calls": (ToolCall(id="a", name="f", arguments="{}"),)}, "another tool_calls"),
        ({"reasoning": "Hm."}, "another reasoning"),
    ],
)
def test_it_sees_deltas_that_came_twice(changes: dict, words: str) -> None:
    once = outcome("tools, strict", "I do.")
    (difference,) = differences(outcome("tools, strict", "I do.", **changes), once)
    assert words in difference
