"""The workload that benchmarks/engine/cpu_engine.py runs on each engine, and its figures."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.peers.engine_process import EngineProcess
from octavo.bench.workload import random_prompts

VOCAB_SIZE = 49152


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Lengths in tokens. sharers: requests that begin with the same `shared` tokens, followed by `own` tokens each."""

    prompt: int = 128
    output: int = 128
    long_prompt: int = 1500
    shared: int = 1024
    own: int = 64
    shared_output: int = 32
    sharers: int = 16


# Shows within a minute that an engine runs the whole workload.
SMOKE_SIZES = Sizes(prompt=16, output=4, long_prompt=64, shared=64, own=16, shared_output=4, sharers=4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured figure. kind: throughput (output tokens/s), prefill (prompt tokens/s), shared_prefix (seconds),
    first_token (seconds) or decode (output tokens/s)."""

    kind: str
    # Concurrent requests.
    concurrency: int
    # One value a round.
    values: tuple[float, ...]
    prompt_tokens_computed: int | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def key(self) -> tuple[str, int]:
        return self.kind, self.concurrency


class Prompts:
    """Random prompts, new each time, so that no engine finds the blocks of an earlier round in its cache."""

    def __init__(self, seed: int) -> None:
        self._seeds = itertools.count(seed)

    def draw(self, number: int, length: int) -> list[list[int]]:
        return random_prompts(number, length, VOCAB_SIZE, next(self._seeds))


def measure(
    engine: EngineProcess,
    sizes: Sizes,
    concurrencies: Sequence[int],
    *,
    rounds: int,
    seconds: float,
    seed: int,
) -> Iterator[Figure]:
    """Yields all figures of one engine, after a warm-up. rounds: of each figure, at most; none begins once its rounds
    have taken `seconds` together. Raises EngineFailedError."""
    prompts = Prompts(seed)
    engine.run(prompts.draw(min(8, max(concurrencies)), sizes.prompt), min(8, sizes.output))
    for concurrency in concurrencies:

        def throughput(number: int = concurrency) -> float:
            answer = engine.run(prompts.draw(number, sizes.prompt), sizes.output)
            return number * sizes.output / answer.seconds

        yield Figure(kind="throughput", concurrency=concurrency, values=tuple(_in_rounds(throughput, rounds, seconds)))

    def prefill() -> float:
        return sizes.long_prompt / engine.run(prompts.draw(1, sizes.long_prompt), 1).seconds

    yield Figure(kind="prefill", concurrency=1, values=tuple(_in_rounds(prefill, rounds, seconds)))
    computed: list[int | None] = []

    def shared_prefix() -> float:
        (first,) = prompts.draw(1, sizes.shared)
        together = [first + own for own in prompts.draw(sizes.sharers, sizes.own)]
        answer = engine.run(together, sizes.shared_output, shared=sizes.shared)
        computed.append(answer.extra.get("prompt_tokens_computed"))
        return answer.seconds

    yield Figure(
        kind="shared_prefix",
        concurrency=sizes.sharers,
        values=tuple(_in_rounds(shared_prefix, rounds, seconds)),
        prompt_tokens_computed=computed[0],
    )


# Tokens that follow a long prompt.
LONG_OUTPUT = 32


def measure_context(engine: EngineProcess, num_tokens: int, *, rounds: int, seed: int) -> Iterator[Figure]:
    """Yields the time to the first token of a prompt of so many tokens, and the speed of the tokens after it. Raises
    EngineFailedError."""
    prompts, first_tokens, decodes = Prompts(seed), list[float](), list[float]()
    tells_both = "prompt_seconds" in engine.run(prompts.draw(1, min(512, num_tokens)), 2).extra
    for _ in range(rounds):
        prompt = prompts.draw(1, num_tokens)
        if tells_both:
            answer = engine.run(prompt, LONG_OUTPUT)
            first_tokens.append(answer.extra["prompt_seconds"])
            decodes.append(LONG_OUTPUT / answer.extra["decode_seconds"])
        else:
            first_tokens.append(engine.run(prompt, 1).seconds)
            # The prompt is cached now, but for its last block.
            seconds = engine.run(prompt, 1 + LONG_OUTPUT).seconds - engine.run(prompt, 1).seconds
            decodes.append(LONG_OUTPUT / seconds)
    yield Figure(kind="first_token", concurrency=1, values=tuple(first_tokens))
    yield Figure(kind="decode", concurrency=1, values=tuple(decodes))


def _in_rounds(measure_once: Callable[[], float], rounds: int, seconds: float) -> Iterator[float]:
    end = time.monotonic() + seconds
    for number in range(rounds):
        if number and time.monotonic() > end:
            return
        yield measure_once()
