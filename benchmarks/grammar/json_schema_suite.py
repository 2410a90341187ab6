"""Tries every schema of the official JSON Schema test suite, draft 2020-12.

    python -m benchmarks.grammar.json_schema_suite [--sdist FILE] [--outputs 12] [--seed S] [--json]

The suite comes from the source distribution of jsonschema that is installed here, which pip downloads unless --sdist
names it. A schema is accepted or refused with a reason. For each accepted one:
- outputs are drawn with random logits through the masks of SmolLM2's vocabulary; jsonschema checks each one that ends;
- each valid instance, written with its keys in the schema's order, must be a possible output, or is "too strict";
- no invalid instance may be one, or it is "too loose".
Formats are enforced, so the tests of optional/format count, too, where jsonschema has a checker. Takes 2 minutes. Exits
1 if anything is too loose.
"""

import argparse
import importlib.metadata
import itertools
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

from jsonschema import Draft202012Validator
from rich.console import Console
from rich.table import Table

from benchmarks.grammar.engines import accepts, draw, engine, text_of
from benchmarks.grammar.suite_cases import Case, cases, download
from protos.inference_pb2 import Constraint
from runtime.grammar.engine import ConstraintError

_MOST_ORDERS = 120


@dataclass(slots=True)
class Result:
    """The counts of one file of the suite."""

    keyword: str
    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    valid: int = 0
    drawn: int = 0
    unfinished: int = 0
    too_strict: list[str] = field(default_factory=list)
    too_loose: list[str] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description="Tries every schema of the official JSON Schema test suite.")
    parser.add_argument("--sdist", type=Path, help="the source distribution of jsonschema")
    parser.add_argument("--outputs", type=int, default=12, help="outputs drawn for each schema")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="a line for each file of the suite")
    arguments = parser.parse_args()
    archive = arguments.sdist.read_bytes() if arguments.sdist else download(importlib.metadata.version("jsonschema"))
    results = run(cases(archive), arguments.outputs, arguments.seed)
    for result in results if arguments.json else ():
        print(json.dumps(_as_dict(result), ensure_ascii=False))
    if not arguments.json:
        _show(results)
    return int(any(result.too_loose for result in results))


def run(groups: Iterator[Case], num_outputs: int, seed: int) -> list[Result]:
    results: dict[str, Result] = {}
    for case in groups:
        result = results.setdefault(case.keyword, Result(case.keyword))
        try_case(case, result, num_outputs, Random(f"{seed}/{case.keyword}/{case.description}"))
    return list(results.values())


def try_case(case: Case, result: Result, num_outputs: int, random: Random) -> None:
    try:
        constraint = engine().canonical(Constraint(json_schema=json.dumps(case.schema)))
    except ConstraintError as error:
        result.refused[_reason(str(error))] += 1
        return
    result.accepted += 1
    for _ in range(num_outputs):
        output = draw(engine().matcher(constraint), random)
        if output is None:
            result.unfinished += 1
            continue
        result.drawn += 1
        text = text_of(output)
        if not is_valid(case.schema, text):
            result.too_loose.append(f"{case.description}: drew {text[:200]}")
    for instance, valid, description in case.tests:
        result.valid += valid
        texts = list(written(instance, case.schema))
        taken = next((text for text in texts if accepts(engine().matcher(constraint), text)), None)
        if valid and taken is None:
            result.too_strict.append(f"{case.description}: {description}: {texts[0][:120]}")
        elif not valid and taken is not None:
            result.too_loose.append(f"{case.description}: {description}: {taken[:120]}")


def is_valid(schema: Any, text: str) -> bool:
    """Asks jsonschema. Numbers are exact: with doubles, 0.3 is no multiple of 0.1."""
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    instance = json.loads(text, parse_float=Decimal)
    return Draft202012Validator(exact, format_checker=Draft202012Validator.FORMAT_CHECKER).is_valid(instance)


def written(instance: Any, schema: Any) -> Iterator[str]:
    """Yields the instance as text, its keys in the order of the schema, then in others."""
    order = {name: rank for rank, name in enumerate(_names(schema))}

    def sort(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: sort(value[name]) for name in sorted(value, key=lambda name: order.get(name, len(order)))}
        return [sort(each) for each in value] if isinstance(value, list) else value

    for value in (sort(instance), instance):
        yield json.dumps(value, ensure_ascii=False)
    if isinstance(instance, dict):
        for names in itertools.islice(itertools.permutations(instance), _MOST_ORDERS):
            yield json.dumps({name: sort(instance[name]) for name in names}, ensure_ascii=False)


def _names(schema: Any) -> Iterator[str]:
    """The names of properties, in the order in which the schema has them."""
    if isinstance(schema, dict):
        for keyword, value in schema.items():
            if keyword == "properties" and isinstance(value, dict):
                yield from value
            yield from _names(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _names(value)


def _reason(error: str) -> str:
    """A reason without the place."""
    return error.partition(": ")[2][:100] if error.startswith("json_schema at ") else error[:100]


def _as_dict(result: Result) -> dict[str, Any]:
    return {
        "keyword": result.keyword,
        "accepted": result.accepted,
        "refused": sum(result.refused.values()),
        "valid": result.valid,
        "too_strict": len(result.too_strict),
        "too_loose": len(result.too_loose),
        "drawn": result.drawn,
        "unfinished": result.unfinished,
        "reasons": dict(result.refused.most_common()),
        "too_strict_list": result.too_strict,
        "too_loose_list": result.too_loose,
    }


def _show(results: list[Result]) -> None:
    table = Table(
        "keyword", "accepted", "refused", "valid instances", "too strict", "too loose", "outputs drawn", box=None
    )
    sums: Counter[str] = Counter()
    for result in results:
        row = _as_dict(result)
        sums.update({name: count for name, count in row.items() if isinstance(count, int)})
        table.add_row(*(str(row[name]) for name in _COLUMNS))
    table.add_row("all", *(str(sums[name]) for name in _COLUMNS[1:]))
    console = Console(width=160)
    console.print(table)
    for title, lists in (
        ("too loose", [(result, each) for result in results for each in result.too_loose]),
        ("too strict", [(result, each) for result in results for each in result.too_strict]),
    ):
        console.print(f"\n{title}: {len(lists)}")
        for result, each in lists:
            console.print(f"  {result.keyword}: {each}", markup=False, highlight=False)
    console.print("\nrefused, by reason")
    reasons: defaultdict[str, int] = defaultdict(int)
    for result in results:
        for reason, count in result.refused.items():
            reasons[reason] += count
    for reason, count in sorted(reasons.items(), key=lambda item: -item[1]):
        console.print(f"  {count:4} {reason}", markup=False, highlight=False)


_COLUMNS = ("keyword", "accepted", "refused", "valid", "too_strict", "too_loose", "drawn")

if __name__ == "__main__":
    sys.exit(main())
