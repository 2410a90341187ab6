"""The protocol of an engine's runner, in lines of JSON; benchmarks/peers/engine_process.py is the other side.

Once it is ready, the runner writes {settings: {...}}. Then it reads {prompts: [[token id, ...], ...], output, shared}:
greedy requests that begin together, each of exactly `output` tokens, whose prompts have their first `shared` tokens in
common. It answers {seconds, tokens, ...}: the time from the first request's arrival to the last token, and the number
of output tokens. It ends when its input does.

This file runs under the peers' own interpreters, so it uses only the standard library.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Work:
    prompts: list[list[int]]
    output: int
    shared: int


@dataclass(frozen=True)
class Outcome:
    """The result of a Work. seconds: None unless the engine times itself. extra: further fields of the answer."""

    tokens: int
    seconds: float | None = None
    extra: Mapping[str, Any] | None = None


def serve(load: Callable[[], tuple[Mapping[str, Any], Callable[[Work], Outcome]]]) -> None:
    """Answers until the input ends. load: returns the engine's settings, and the function that does the work.

    Anything else that is written to standard output, by C++ libraries as well, goes to standard error.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    settings, run = load()
    print(json.dumps({"settings": settings}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        work = Work(prompts=asked["prompts"], output=asked["output"], shared=asked["shared"])
        start = time.perf_counter()
        outcome = run(work)
        seconds = outcome.seconds or time.perf_counter() - start
        print(
            json.dumps({"seconds": seconds, "tokens": outcome.tokens, **(outcome.extra or {})}),
            file=answers,
            flush=True,
        )
