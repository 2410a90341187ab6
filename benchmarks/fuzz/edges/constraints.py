"""Constraints of clients: hostile schemas, regular expressions, grammars and structural tags."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import psutil

from benchmarks.fuzz.edge import MEMORY_BOUND_MIB, Edge
from benchmarks.fuzz.mutation import change_bytes
from benchmarks.grammar.engines import EOS, accepts, mask_of, vocabulary
from protos.inference_pb2 import Constraint
from runtime.grammar.engine import ConstraintError
from runtime.grammar.llguidance_engine import LlguidanceEngine

_GOOD = Constraint(json_schema='{"type":"object","properties":{"a":{"enum":["x","y"]}},"required":["a"]}')
_SCHEMAS: tuple[Any, ...] = (
    {
        "type": "object",
        "required": ["name"],
        "additionalProperties": False,
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0}},
    },
    {
        "$defs": {"node": {"properties": {"next": {"$ref": "#/$defs/node"}, "value": {"type": ["number", "null"]}}}},
        "$ref": "#/$defs/node",
    },
    {"type": "array", "maxItems": 9, "prefixItems": [{"const": 1}, {"enum": ["a", {"b": []}]}], "items": {"const": 0}},
    {"anyOf": [{"type": "string", "pattern": "^[a-z]+@[a-z]+\\.(com|org)$"}, {"format": "date-time"}]},
    {
        "oneOf": [
            {"properties": {"kind": {"const": "a"}}, "required": ["kind"]},
            {"properties": {"kind": {"const": "b"}}, "required": ["kind"]},
        ],
        "type": "object",
    },
    {"allOf": [{"type": "number", "multipleOf": 0.25}, {"exclusiveMinimum": -3, "maximum": 1e9}]},
    {
        "patternProperties": {"^x-": {"type": "string"}, "^y": {"minLength": 2}},
        "minProperties": 1,
        "maxProperties": 5,
        "additionalProperties": {"type": "integer"},
    },
)
_REGEXES = (
    "[a-z]{3,10}(-[0-9]+)*",
    "(a|b|c)*abb",
    "\\d{4}-\\d{2}-\\d{2}",
    "(?:(?:25[0-5]|[01]?[0-9]?[0-9])\\.){3}x",
    "é+[^\\x00]",
)
_GRAMMARS = (
    'start: expr\nexpr: term (("+" | "-") term)*\nterm: NUMBER | "(" expr ")"\nNUMBER: /[0-9]+/\n%ignore /[ ]+/\n',
    'root ::= "(" root ")" | [a-z]+ ("," ws [0-9]{1,3})*\nws ::= [ \\t\\n]*\n',
    'start: "a" b | B{2,5}\nb: start "c"?\nB: "x" & ~/y+/\n',
)
_TAGS: tuple[Any, ...] = (
    {"structures": [{"begin": "<f=a>", "schema": {"type": "object"}, "end": "</f>"}], "triggers": ["<f="]},
    {
        "type": "structural_tag",
        "format": {
            "type": "sequence",
            "elements": [
                {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"},
                {
                    "type": "or",
                    "elements": [{"type": "const_string", "value": "yes"}, {"type": "regex", "pattern": "no+"}],
                },
            ],
        },
    },
)
_NUMBERS = (0, -1, 1, 2, 100, 4096, 10**6, 2**31, 2**53 + 1, 10**40, 0.1, 1e-300, 1e308, 1.0)
_KEYWORDS = (
    *("minItems", "maxItems", "minLength", "maxLength", "minimum", "maximum", "multipleOf", "minProperties", "const"),
    *("maxProperties", "required", "enum", "type", "items", "pattern", "format", "$ref", "not", "if", "uniqueItems"),
    *("contains", "x-guidance", "allOf", "oneOf", "anyOf", "properties", "additionalProperties", "patternProperties"),
    *("$id", "$schema"),
)
_EXPLOSIONS = (
    "((a{1,100}){1,100}){1,100}",
    "(a|aa)+$",
    "(.*a){30}",
    "((((((((((x?){9}){9}){9}){9}){9}){9}){9}){9}){9}){9}",
    ".*a.{40}",
    "(a*)*b",
    "[a-z]{1,9999}[b-y]{1,9999}",
    "(?:a|b|ab)*c(?:a|b|ab){0,500}d",
    "^(([a-z])+.)+[A-Z]([a-z])+$",
)


# Far above what a constraint may have.
_MOST_CHARS = 2**18


class Constraints:
    def __init__(self, engine: LlguidanceEngine, thread: ThreadPoolExecutor) -> None:
        self._engine = engine
        # One: each thread's allocator keeps what was freed for itself.
        self._thread = thread
        # Memory of the process that compiles, once it has compiled one.
        self._first_mib = 0.0
        # Processes of others.
        self._others = set(psutil.Process().children())

    def malformed(self, random: Random) -> bytes:
        return hostile_constraint(random).SerializeToString()

    async def feed(self, message: bytes) -> str:
        return await self._run(self._try, Constraint.FromString(message))

    async def _run(self, function: Callable[[Constraint], Any], constraint: Constraint) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, constraint)

    def _try(self, constraint: Constraint) -> str:
        try:
            constraint = self._engine.canonical(constraint)
        except ConstraintError as error:
            bounds = next((word for word in ("MiB", "more than", "limit", "large") if word in str(error)), "")
            return "over a bound" if bounds else "refused"
        assert self._engine.canonical(constraint) == constraint
        matcher = self._engine.matcher(constraint)
        random = Random(constraint.SerializeToString())
        for _ in range(6):
            allowed = mask_of(matcher)
            if not allowed.size:
                assert matcher.error
                return "at its end: " + matcher.error.split(":")[0][:30]
            token_id = int(allowed[random.randrange(len(allowed))])
            if not matcher.take(token_id):
                # A rule that has no end is over a limit at some time.
                assert matcher.error
                return "at its end: " + matcher.error.split(":")[0][:30]
            if token_id == EOS:
                break
        return "generated"

    async def check(self) -> None:
        constraint = await self._run(self._engine.canonical, _GOOD)
        assert accepts(self._engine.matcher(constraint), '{"a": "y"}')
        assert not accepts(self._engine.matcher(constraint), '{"a": "z"}')
        (compiling,) = set(psutil.Process().children()) - self._others
        mib = compiling.memory_info().rss / 2**20
        self._first_mib = self._first_mib or mib
        grown = mib - self._first_mib
        assert grown <= MEMORY_BOUND_MIB, f"the process that compiles has grown by {grown:.0f} MiB"


def hostile_constraint(random: Random) -> Constraint:
    """Returns a constraint that nobody should send."""
    constraint = Constraint()
    kind = random.random()
    if kind < 0.45:
        constraint.json_schema = _text(_spoiled(random.choice(_SCHEMAS), random), random)
    elif kind < 0.7:
        pattern = random.choice(_EXPLOSIONS if random.random() < 0.3 else _REGEXES)
        constraint.regex = _changed(_multiplied(pattern, random), random)
    elif kind < 0.9:
        constraint.grammar = _changed(_multiplied(random.choice(_GRAMMARS), random), random)
    else:
        constraint.structural_tag = _text(_spoiled(random.choice(_TAGS), random), random)
    constraint.disable_any_whitespace = random.random() < 0.1
    constraint.disable_additional_properties = random.random() < 0.1
    constraint.after = random.choice(("", "", "", "</think>", "aa", "\n"))
    return constraint


def _text(value: Any, random: Random) -> str:
    text = json.dumps(value)
    return _changed(text, random) if random.random() < 0.3 else text


def _changed(text: str, random: Random) -> str:
    """Changes a text's bytes in half of the cases."""
    return change_bytes(text.encode(), random).decode(errors="replace") if random.random() < 0.5 else text


def _multiplied(text: str, random: Random) -> str:
    """Nests and repeats a part of a regular expression or grammar."""
    for _ in range(random.choice((0, 0, 1, 2, 5))):
        begin = random.randrange(len(text))
        end = random.randrange(begin, len(text)) + 1
        times = random.choice(("*", "+", "?", "{2}", "{1,100}", "{0,9999}", "{50,}", "|x", "&", "~"))
        text = f"{text[:begin]}({text[begin:end] * random.choice((1, 1, 2, 20))}){times}{text[end:]}"
        if len(text) > _MOST_CHARS:
            break
    return text


def _spoiled(value: Any, random: Random) -> Any:
    """Changes a JSON value at some places: hostile numbers, keywords, and parts within parts."""
    value = json.loads(json.dumps(value))
    for _ in range(random.choice((1, 1, 2, 4, 8))):
        places = list(_places(value))
        if not places:
            break
        holder, key = random.choice(places)
        match random.randrange(8):
            case 0:
                holder[key] = random.choice(_NUMBERS)
            case 1:
                holder[key] = random.choice(("", "\0", "é" * 500, "#", "#/$defs/node", "object", *_EXPLOSIONS))
            case 2 if isinstance(holder[key], dict):
                holder[key][random.choice(_KEYWORDS)] = random.choice(
                    (*_NUMBERS, [], {}, True, ["a"], "x", holder[key].copy())
                )
            case 3:
                for _ in range(random.choice((1, 3, 40))):
                    holder[key] = {random.choice(("allOf", "anyOf", "oneOf")): [holder[key], {"type": "object"}]}
            case 4:
                holder[key] = [holder[key]] * random.choice((2, 20, 300))
            case 5 if isinstance(holder[key], dict):
                holder[key] |= {f"p{index}": {"type": "string"} for index in range(random.choice((2, 50, 500)))}
            case 6:
                for _ in range(random.choice((1, 10, 100))):
                    holder[key] = {"type": "array", "items": holder[key], "maxItems": random.choice((1, 20, 4096))}
            case _:
                if isinstance(holder, dict):
                    del holder[key]
    return value


def _places(value: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting and len(found) < 2000:
        each = waiting.pop()
        items = each.items() if isinstance(each, dict) else enumerate(each) if isinstance(each, list) else ()
        for key, inner in items:
            found.append((each, key))
            waiting.append(inner)
    return found


@asynccontextmanager
async def constraints(directory: Path) -> AsyncIterator[Edge]:
    engine = LlguidanceEngine(vocabulary())
    with ThreadPoolExecutor(1) as thread:
        try:
            yield Constraints(engine, thread)
        finally:
            engine.close()
