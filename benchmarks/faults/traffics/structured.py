"""Constrained and tool-calling streams: JSON schemas, regular expressions, choices, grammars, and tools called in every
way. What clients get is also compared with the constraint, the schemas of the tools, and what the parser makes of the
whole text at once: no call and no delta may come twice.
"""

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from jsonschema import Draft202012Validator

from benchmarks.faults.crowd import Outcome, Plan
from benchmarks.faults.ground import COMMON_FLAGS
from benchmarks.faults.traffics.streams import StreamKind
from octavo import SamplingParams
from octavo.client.constraints import Constraint
from octavo.client.requests import Message, RequestOptions, generate_request
from octavo.client.results import Choice, FinishReason
from octavo.client.tools import Tool, ToolCall
from router.parsing.parser import OutputFormat, OutputParser

# So few KV blocks that five to ten of these streams fit: others are preempted, and their grammars are folded again when
# they come back.
FLAGS = (*COMMON_FLAGS, "--max-num-seqs=32", "--max-model-len=1024", "--num-blocks-override=90")

_PLACES = ("Paris", "Zürich", "São Paulo", "Tōkyō", "Springfield", "Reykjavík", "Windhoek", "Kraków")

_CITY_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "number_of_inhabitants_at_the_last_census": {"type": "integer", "minimum": 0, "maximum": 99999999},
        "continent": {"enum": ["Europe", "Asia", "Africa", "North America", "South America", "Oceania"]},
        "neighbours": {"type": "array", "items": {"$ref": "#/$defs/neighbour"}, "minItems": 1, "maxItems": 3},
        "motto": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 40}]},
    },
    "required": ["name", "number_of_inhabitants_at_the_last_census", "continent", "neighbours", "motto"],
    "additionalProperties": False,
    "$defs": {
        "neighbour": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 16},
                "distance_in_km": {"type": "integer", "minimum": 0, "maximum": 20000},
            },
            "required": ["name", "distance_in_km"],
            "additionalProperties": False,
        }
    },
}
_TEXTS = (
    "There is a train at noon, and it waits for the ferry if the sea is rough and the crossing takes longer.",
    "There is a train at noon, and it waits for the ferry if the sea is calm and nobody wants it to leave earlier.",
    "There is no train at all today, because the line between the harbour and the town is closed until the weekend.",
)
_PATTERN = r"\d{4}-\d{2}-\d{2} \d{2}:\d{2}, the [a-z]{4,30} station in [A-Z][a-z]{2,20}\."
GRAMMAR = """start: "sum = " product (" + " product)~4..9
product: factor ("*" factor)*
factor: NUMBER | "(" factor " - " NUMBER ")"
NUMBER: /[1-9][0-9]{0,3}/
"""

_WEATHER = Tool(
    name="get_weather",
    description="Tells the weather in a city.",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "days_from_today": {"type": "integer", "minimum": 0, "maximum": 14},
            "unit_of_temperature": {"enum": ["celsius", "fahrenheit"]},
        },
        "required": ["city", "days_from_today", "unit_of_temperature"],
        "additionalProperties": False,
    },
    strict=True,
)
_ROUTE = Tool(
    name="find_route",
    description="Finds a way between two places.",
    parameters={
        "type": "object",
        "properties": {
            "from": {"type": "string", "maxLength": 20},
            "to": {"type": "string", "maxLength": 20},
            "by": {"type": "array", "items": {"enum": ["train", "bus", "foot"]}, "minItems": 1, "maxItems": 2},
        },
        "required": ["from", "to", "by"],
        "additionalProperties": False,
    },
    strict=True,
)
_TOOLS = (_WEATHER, _ROUTE)
_TEMPLATE = """{%- for message in messages %}<|im_start|>{{ message.role }}
{% if loop.first %}Functions: {{ tools | tojson }}
{% endif %}{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""


def _question(choose: random.Random) -> str:
    return f"How do I get from {choose.choice(_PLACES)} to {choose.choice(_PLACES)} on day {choose.randrange(1000)}?"


def _free(constraint: Constraint) -> Callable[[random.Random], tuple[SamplingParams, RequestOptions]]:
    def make(choose: random.Random) -> tuple[SamplingParams, RequestOptions]:
        return SamplingParams(constraint=constraint), {"parse_output": choose.random() < 0.5}

    return make


def _object(choose: random.Random) -> tuple[SamplingParams, RequestOptions]:
    """Not the empty one; a stop string ends it where it stands."""
    constraint = Constraint(json_object=True, disable_any_whitespace=True)
    sampling = SamplingParams(constraint=constraint, bad_words=["{}"], frequency_penalty=0.3, stop=["],", "00"])
    return sampling, {"parse_output": choose.random() < 0.5}


def _required(choose: random.Random) -> tuple[SamplingParams, RequestOptions]:
    options = _with_tools()
    options["tool_choice"] = "required"
    if choose.random() < 0.3:
        options["parallel_tool_calls"] = False
        return SamplingParams(), options
    # More than one call.
    return SamplingParams(min_tokens=90), options


def _named(choose: random.Random) -> tuple[SamplingParams, RequestOptions]:
    options = _with_tools()
    options["tool_choice"] = choose.choice(_TOOLS)
    return SamplingParams(), options


def _strict(choose: random.Random) -> tuple[SamplingParams, RequestOptions]:
    options = _with_tools()
    options["parallel_tool_calls"] = choose.random() < 0.5
    return SamplingParams(), options


def _with_tools() -> RequestOptions:
    return {"tools": _TOOLS, "chat_template": _TEMPLATE}


_KINDS: dict[str, Callable[[random.Random], tuple[SamplingParams, RequestOptions]]] = {
    "json schema": _free(Constraint(json=_CITY_SCHEMA)),
    "tools, required": _required,
    "regex": _free(Constraint(regex=_PATTERN)),
    "tools, strict": _strict,
    "choice": _free(Constraint(choice=_TEXTS)),
    "tools, named": _named,
    "grammar": _free(Constraint(grammar=GRAMMAR)),
    "json schema, behind text": _free(Constraint(json=_CITY_SCHEMA, after=".", disable_any_whitespace=True)),
    "json object": _object,
}


def make_structured_plans(count: int, seed: int, *, max_tokens: int) -> list[Plan]:
    """Makes plans of all kinds in turn: every second one samples, half of these without a seed of the client's."""
    choose = random.Random(f"{seed}/structured")
    return [_make_plan(number, seed, choose, max_tokens) for number in range(count)]


def _make_plan(number: int, seed: int, choose: random.Random, max_tokens: int) -> Plan:
    kind = [*_KINDS][number // 2 % len(_KINDS)]
    sampling, options = _KINDS[kind](choose)
    # Ids of calls are a function of it.
    options["request_id"] = f"structured-{seed}-{number}"
    prompt: list[Message] = [{"role": "user", "content": _question(choose)}]
    if "tools" in options:
        prompt = [*_conversation(choose), *prompt]
    sampling = replace(
        sampling,
        temperature=0.0,
        max_tokens=max_tokens,
        min_tokens=min(sampling.min_tokens, max_tokens),
        logprobs=2 if number % 6 == 3 else None,
        n=choose.choice([1, 1, 2, 3]),
    )
    if number % 2:
        sampling = replace(
            sampling,
            temperature=choose.choice([0.6, 0.8, 1.0]),
            top_p=choose.choice([0.9, 1.0]),
            seed=choose.randrange(2**32) if number % 4 == 1 else None,
        )
    return Plan(number=number, kind=kind, prompt=prompt, sampling=sampling, options=options, is_unique=True)


def _conversation(choose: random.Random) -> list[Message]:
    """Some calls and their results, so that a small model goes on with calls."""
    said: list[Message] = []
    for turn in range(2):
        there, here = choose.choice(_PLACES), choose.choice(_PLACES)
        arguments = json.dumps({"from": here, "to": there, "by": ["train"]}, ensure_ascii=False)
        call = ToolCall(id=f"call_{turn}", name=_ROUTE.name, arguments=arguments)
        said += [
            {"role": "user", "content": f"How do I get from {here} to {there}?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call.id, "content": f"{choose.randrange(1, 30)} hours"},
        ]
    return said


# --- Checks of outputs

# That of the flag --tool-call-parser.
_FORMAT = OutputFormat.named("hermes", "")
_NUMBER, _DIFFERENCE = r"[1-9]\d{0,3}", r"\([1-9]\d{0,3} - [1-9]\d{0,3}\)"


def breaches(outcome: Outcome) -> list[str]:
    """Returns what a stream's choices break: their constraint, their tools' schemas, or that deltas come once."""
    if outcome.error is not None:
        return []
    ids = [call.id for choice in outcome.generation.choices for call in choice.tool_calls]
    found = ["two calls have one id"] * (len(ids) > len(set(ids)))
    for choice in outcome.generation.choices:
        words = [*_constraint_breaches(outcome, choice), *_call_breaches(outcome, choice), *_deltas(outcome, choice)]
        found += [f"choice {choice.index}: {what}" for what in words]
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


STRUCTURED = StreamKind(
    make=lambda count, seed, tokens: make_structured_plans(count, seed, max_tokens=tokens),
    tokens=200,
    flags=FLAGS,
    check=breaches,
)
