"""Checks the output of a constrained or tool-calling stream against its constraint or tools."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jsonschema import Draft202012Validator

from benchmarks.faults.crowd import Difference, Outcome
from octavo.client.requests import generate_request
from octavo.client.results import Choice, FinishReason
from router.parsing.parser import OutputFormat, OutputParser

# That of the flag --tool-call-parser.
_FORMAT = OutputFormat.named("hermes", "")
_NUMBER, _DIFFERENCE = r"[1-9]\d{0,3}", r"\([1-9]\d{0,3} - [1-9]\d{0,3}\)"


def breaches(outcome: Outcome) -> list[Difference]:
    """Returns what a stream's choices break: their constraint, their tools' schemas, or that deltas come once."""
    if outcome.error is not None:
        return []
    ids = [call.id for choice in outcome.generation.choices for call in choice.tool_calls]
    found = [Difference(number=outcome.plan.number, what="two calls have one id")] * (len(ids) > len(set(ids)))
    for choice in outcome.generation.choices:
        words = [*_constraint_breaches(outcome, choice), *_call_breaches(outcome, choice), *_deltas(outcome, choice)]
        found += [Difference(number=outcome.plan.number, choice=choice.index, what=what) for what in words]
    return found


def _is_whole(choice: Choice) -> bool:
    """False if its length or a stop string has cut it."""
    return choice.finish_reason is FinishReason.STOP and choice.stop is None


def _constraint_breaches(outcome: Outcome, choice: Choice) -> Iterator[str]:
    constraint = outcome.plan.sampling.constraint
    if constraint is None or not _is_whole(choice):
        return
    text = choice.text
    if constraint.after:
        _, found, text = text.partition(constraint.after)
        if not found:
            yield f"it ends before {constraint.after!r}: {choice.text!r}"
            return
    if constraint.regex is not None and not re.fullmatch(constraint.regex, text):
        yield f"no match of the pattern: {text!r}"
    if constraint.choice is not None and text not in constraint.choice:
        yield f"none of the texts: {text!r}"
    if constraint.grammar is not None:
        yield from _grammar_breaches(text)
    if constraint.json is not None or constraint.json_object:
        schema = {"type": "object"} if constraint.json_object else constraint.json
        assert isinstance(schema, Mapping)
        yield from _schema_breaches(text, schema)


def _call_breaches(outcome: Outcome, choice: Choice) -> Iterator[str]:
    options = outcome.plan.options
    tools = {tool.name: tool for tool in options.get("tools", ())}
    asked = options.get("tool_choice", "auto")
    calls = choice.tool_calls
    is_whole = _is_whole(choice)
    if tools and asked != "auto" and is_whole and not calls:
        yield "it has no call"
    only_one = not options.get("parallel_tool_calls", True) or not isinstance(asked, str)
    if only_one and len(calls) > 1:
        yield f"it has {len(calls)} calls, and may have one"
    for index, call in enumerate(calls):
        if call.name not in tools or not (isinstance(asked, str) or call.name == asked.name):
            yield f"it calls {call.name!r}"
        elif is_whole or index < len(calls) - 1:
            yield from _schema_breaches(call.arguments, tools[call.name].parameters or {})


def _grammar_breaches(text: str) -> Iterator[str]:
    """Reads a text of GRAMMAR from the inside: a difference in parentheses is a number."""
    reduced, count = text, 1
    while count:
        reduced, count = re.subn(_DIFFERENCE, "1", reduced)
    product = rf"{_NUMBER}(\*{_NUMBER})*"
    if not re.fullmatch(rf"sum = {product}( \+ {product})*", reduced):
        yield f"no text of the grammar: {text!r}"


def _schema_breaches(text: str, schema: Mapping[str, Any]) -> Iterator[str]:
    try:
        instance = json.loads(text)
    except ValueError as error:
        yield f"no JSON, {error}: {text!r}"
        return
    for error in Draft202012Validator(schema).iter_errors(instance):
        yield f"not valid: {error.message}"


def _deltas(outcome: Outcome, choice: Choice) -> Iterator[str]:
    """Compares the deltas, put together, with what the parser makes of the whole text at once."""
    plan = outcome.plan
    chat = generate_request(plan.prompt, plan.sampling, plan.options)
    if not chat.parse_output:
        return
    parser = OutputParser(_FORMAT, chat.chat, request_id=chat.request_id, choice=choice.index)
    deltas = [*parser.push(choice.text), *parser.finish()]
    pieces = [delta.tool_call for delta in deltas if delta.HasField("tool_call")]
    calls = [(piece.id, piece.name) for piece in pieces if piece.name]
    if [(call.id, call.name) for call in choice.tool_calls] != calls:
        yield f"the calls {choice.tool_calls}, not {calls}"
    if [call.arguments for call in choice.tool_calls] != [
        "".join(piece.arguments for piece in pieces if piece.index == index) for index in range(len(calls))
    ]:
        yield f"other arguments than in its text: {choice.tool_calls}"
    if choice.content != "".join(delta.content for delta in deltas):
        yield f"other content than in its text: {choice.content!r}"
