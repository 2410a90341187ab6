"""Measures constraints at a router's intake, and how long they hold its event loop.

    python -m benchmarks.grammar.intake [--schemas 1000] [--seconds 30] [--json]

On SmolLM2's vocabulary, a line for each part: distinct schemas of eight properties, one after another, six times over
to see memory grow; the same again; schemas that are refused, and again; then a caller that asks for a new schema each
0.25 s, for so many seconds, beside two that send nothing but schemas that are refused after 2 s. Takes a minute.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import asdict, dataclass

import numpy as np
import psutil

from benchmarks.command import show
from benchmarks.grammar.engines import EOS, MODEL, VOCAB_SIZE
from protos.inference_pb2 import Constraint, ModelInfo
from router.errors import InvalidConstraint
from router.intake.constraints import Constraints, compilers
from router.security.identity import Identity, set_caller
from router.telemetry.metrics import RouterMetrics
from runtime.grammar.engine import COMPILE_SECONDS
from runtime.model_files import resolve_model
from runtime.tokenizer.files import tokenizer_directory

# All with distinct schemas.
_NUM_ROUNDS = 6
_PAUSE_S = 0.25
# After so long, both slow callers are known as such.
_KNOWN_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part's waits in milliseconds; the loop's longest gap; memory of this process and of those that compile."""

    name: str
    num_constraints: int
    num_refused: int
    seconds: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    longest_gap_ms: float
    own_mib: int
    compiling_mib: list[int]


class _Intake:
    def __init__(self) -> None:
        directory = tokenizer_directory(resolve_model(MODEL))
        self.constraints = Constraints(compilers(directory, COMPILE_SECONDS), RouterMetrics())
        self._model = ModelInfo(vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])
        self._gaps: list[float] = []

    async def watch(self) -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            self._gaps.append(now - last)
            last = now

    async def ask(self, caller: str, schema: dict[str, object]) -> tuple[float, bool]:
        """Returns the seconds that it took, and whether it was refused."""
        set_caller(Identity(tenant=caller))
        since, is_refused = time.perf_counter(), False
        try:
            await self.constraints.canonical(Constraint(json_schema=json.dumps(schema)), self._model)
        except InvalidConstraint:
            is_refused = True
        return time.perf_counter() - since, is_refused

    async def all(self, name: str, schemas: Iterable[dict[str, object]]) -> Part:
        self._gaps.clear()
        since = time.perf_counter()
        return self.part(name, [await self.ask("one", schema) for schema in schemas], since)

    def part(self, name: str, asked: list[tuple[float, bool]], since: float) -> Part:
        p50, p99, longest = np.percentile([1000 * seconds for seconds, _ in asked], (50, 99, 100)).round(2).tolist()
        return Part(
            name=name,
            num_constraints=len(asked),
            num_refused=sum(is_refused for _, is_refused in asked),
            seconds=round(time.perf_counter() - since, 3),
            p50_ms=p50,
            p99_ms=p99,
            max_ms=longest,
            longest_gap_ms=round(1000 * max(self._gaps, default=0.0), 1),
            own_mib=psutil.Process().memory_info().rss >> 20,
            compiling_mib=[each.memory_info().rss >> 20 for each in psutil.Process().children()],
        )

    async def beside_slow_callers(self, seconds: float) -> AsyncIterator[Part]:
        async def send(caller: str, first: int) -> None:
            number = first
            while True:
                await self.ask(caller, {"type": "integer", "multipleOf": 2**31 + 2 * number})
                number += 1

        slow = [asyncio.create_task(send(f"slow {i}", 10_000 * i)) for i in range(2)]
        numbers = iter(range(10**6, 2 * 10**6))
        for name, share in (("beside two slow callers, at first", _KNOWN_S), ("beside them, later", seconds)):
            self._gaps.clear()
            since, asked = time.perf_counter(), []
            while time.perf_counter() - since < share:
                await asyncio.sleep(_PAUSE_S)
                asked.append(await self.ask("quick", _schema(next(numbers))))
            yield self.part(name, asked, since)
        for each in slow:
            each.cancel()
        await asyncio.gather(*slow, return_exceptions=True)


def _schema(number: int, **more: object) -> dict[str, object]:
    properties = {f"field_{number}_{index}": {"type": "string", "maxLength": index + 5} for index in range(8)}
    return {"type": "object", "properties": properties, "required": list(properties), **more}


async def _parts(num_schemas: int, seconds: float) -> AsyncIterator[Part]:
    intake = _Intake()
    watching = asyncio.create_task(intake.watch())
    with contextlib.closing(intake.constraints):
        yield await intake.all("the first one", [_schema(-1)])
        for round_ in range(_NUM_ROUNDS):
            numbers = range(round_ * num_schemas, (round_ + 1) * num_schemas)
            yield await intake.all("distinct", map(_schema, numbers))
        yield await intake.all("again", map(_schema, range((_NUM_ROUNDS - 1) * num_schemas, _NUM_ROUNDS * num_schemas)))
        for name in ("refused", "refused again"):
            yield await intake.all(name, (_schema(number, contains={"const": number}) for number in range(num_schemas)))
        async for part in intake.beside_slow_callers(seconds):
            yield part
    watching.cancel()


async def _main(num_schemas: int, seconds: float, *, as_json: bool) -> None:
    async for part in _parts(num_schemas, seconds):
        show(asdict(part), as_json=as_json)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    asyncio.run(_main(arguments.schemas, arguments.seconds, as_json=arguments.json))
    return 0


if __name__ == "__main__":
    sys.exit(main())
