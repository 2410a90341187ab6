"""Measures what grammars cost: compiling, masks, forced tokens, copies and memory, for SmolLM2's vocabulary.

    python -m benchmarks.grammar.cost [--schemas 1000] [--json]

Each of the schemas is another one: an object of 2 to 12 properties, of all types, with objects and arrays in it. For
each: `check` is the check at intake (a process of its own compiles it; then it is compiled here, with its first mask),
`matcher` what a worker does once for a row. Then an output is drawn, with random logits: `mask` and `take` are for each
of its tokens, all kinds of positions together; `mask_first_use` are those that a lexer computes for the first time.
Times in microseconds. `rss_mib` is this process's memory after each fifth of the schemas.
"""

import argparse
import gc
import json
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import numpy as np
import psutil

from benchmarks.command import rounded, show
from benchmarks.grammar.engines import EOS, VOCAB_SIZE, engine, mask_of, vocabulary
from protos.inference_pb2 import Constraint
from runtime.grammar.engine import Matcher

_WORDS = ("name", "city", "order", "item", "price", "count", "date", "state", "total", "email", "user", "note", "kind")
_MOST_TOKENS = 100


class Times(dict[str, "array[float]"]):
    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        since = time.perf_counter()
        yield
        self.setdefault(name, array("d")).append((time.perf_counter() - since) * 1e6)


def schema(random: Random, depth: int = 0) -> dict[str, Any]:
    """A schema as clients write them."""
    kind = random.randrange(8 if depth < 2 else 6)
    match kind:
        case 0:
            return {"type": "string", "description": "some text"}
        case 1:
            return {"type": "string", "maxLength": random.randrange(5, 200)}
        case 2:
            return {"type": random.choice(("integer", "number")), "minimum": random.randrange(100)}
        case 3:
            return {"enum": random.sample(_WORDS, 4)}
        case 4:
            return {"type": "string", "pattern": f"^[a-z]{{1,{random.randrange(2, 30)}}}(-[0-9]+)?$"}
        case 5:
            return {"type": ["boolean", "null"]}
        case 6:
            return {"type": "array", "items": schema(random, depth + 1), "maxItems": random.randrange(1, 20)}
    names = [f"{random.choice(_WORDS)}_{random.choice(_WORDS)}_{index}" for index in range(random.randrange(2, 13))]
    return {
        "type": "object",
        "properties": {name: schema(random, depth + 1) for name in names},
        "required": names[: random.randrange(len(names))],
        "additionalProperties": random.random() < 0.3,
    }


def output(matcher: Matcher, random: Random, times: Times) -> int:
    """Draws an output; a first pass computes each mask for the first time, a second one again."""
    fresh, tokens, mask_W = matcher.copy(), list[int](), np.empty((VOCAB_SIZE + 31) // 32, np.int32)
    while len(tokens) < _MOST_TOKENS:
        with times.of("mask_first_use"):
            matcher.fill_mask(mask_W)
        allowed = np.flatnonzero(np.unpackbits(mask_W.view(np.uint8), bitorder="little"))
        token_id = int(allowed[random.randrange(len(allowed))])
        if token_id == EOS or not matcher.take(token_id):
            break
        tokens.append(token_id)
    for token_id in tokens:
        with times.of("forced"):
            fresh.forced_tokens(16)
        with times.of("mask"):
            fresh.fill_mask(mask_W)
        with times.of("take"):
            fresh.take(token_id)
    with times.of("copy"):
        fresh.copy()
    return len(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description="What grammars cost.")
    parser.add_argument("--schemas", type=int, default=1000)
    parser.add_argument("--json", action="store_true", help="a line for each figure")
    arguments = parser.parse_args()
    random, times, process = Random(1), Times(), psutil.Process()
    with times.of("vocabulary"):
        vocabulary()
    with times.of("engine"):
        made = engine()
    made.canonical(Constraint(json_object=True))
    memory, num_tokens = [process.memory_info().rss], 0
    for number in range(1, arguments.schemas + 1):
        asked = Constraint(
            json_schema=json.dumps({"type": "object", "properties": {"root": schema(random), f"n{number}": {}}})
        )
        with times.of("check"):
            constraint = made.canonical(asked)
        with times.of("matcher"):
            matcher = made.matcher(constraint)
        num_tokens += output(matcher, random, times)
        if number % max(arguments.schemas // 5, 1) == 0:
            gc.collect()
            memory.append(process.memory_info().rss)
    free = made.matcher(made.canonical(Constraint(json_object=True, after="</think>")))
    mask_of(free)
    for _ in range(200):
        with times.of("mask_free_part"):
            free.fill_mask(np.empty((VOCAB_SIZE + 31) // 32, np.int32))
    for name, values in times.items():
        p50, p99, worst = (float(np.percentile(values, each)) for each in (50, 99, 100))
        figures = {
            "what": name,
            "times": len(values),
            "p50_us": p50,
            "p99_us": p99,
            "max_us": worst,
            "sum_s": sum(values) / 1e6,
        }
        show(rounded(figures, 1), as_json=arguments.json)
    row = {"what": "memory", "tokens": num_tokens, "rss_mib": [round(each / 2**20) for each in memory]}
    show(row, as_json=arguments.json)


if __name__ == "__main__":
    main()
