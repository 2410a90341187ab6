"""Measured steps: `octavo bench throughput` records them, `octavo plan --fit` reads them."""

import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from octavo.lab.errors import PlanError
from octavo.plan.costs.step_shape import PaperRows, StepShape
from scheduler.core.messages import Plan

# At most about this many samples per run: consecutive steps of one kind are added up.
_MAX_SAMPLES = 64
# Steps of decodes alone are all alike; a mean of several is less noisy.
_MIN_DECODE_STEPS = 8
_COLUMNS = ("num_steps", *(field.name for field in fields(StepShape)), "seconds")


@dataclass(frozen=True, slots=True)
class StepSample:
    """Consecutive steps, added up: every number is a sum over them."""

    num_steps: int
    shape: StepShape
    seconds: float


class StepRecorder:
    """Records the steps of one engine. It has to start while no request runs."""

    def __init__(self, max_num_seqs: int, *, max_samples: int = _MAX_SAMPLES) -> None:
        self._rows, self._max_samples = PaperRows(max_num_seqs), max_samples
        self._steps: list[tuple[StepShape, float]] = []

    def add(self, plan: Plan, seconds: float) -> None:
        shape, _ = self._rows.apply(plan)
        self.add_shape(shape, seconds)

    def add_shape(self, shape: StepShape, seconds: float) -> None:
        self._steps.append((shape, seconds))

    def samples(self) -> "list[StepSample]":
        return _samples(self.as_json())

    def as_json(self) -> dict[str, Any]:
        """Returns {"columns": names, "rows": a list of numbers per sample}."""
        rows: list[list[float]] = []
        limit = max(_MIN_DECODE_STEPS, -(-len(self._steps) // self._max_samples))
        limit_with_chunks = -(-len(self._steps) // self._max_samples)
        last_kind: object = None
        for shape, seconds in self._steps:
            row = [1, *astuple(shape), seconds]
            kind = (bool(shape.num_chunks), shape.num_decodes)
            if rows and kind == last_kind and rows[-1][0] < (limit_with_chunks if shape.num_chunks else limit):
                rows[-1] = [a + b for a, b in zip(rows[-1], row, strict=True)]
            else:
                rows.append(row)
            last_kind = kind
        return {"columns": list(_COLUMNS), "rows": [[*row[:-1], round(row[-1], 6)] for row in rows]}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of the engine whose steps were measured."""

    block_size: int
    num_blocks: int
    max_model_len: int
    # GiB; 0 if num_blocks was given (num_blocks_override) instead of computed from it.
    kv_cache_memory: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeResult:
    """A result of `octavo bench serve`, for a whole cluster."""

    num_requests: int
    concurrency: int
    # Requests per second; inf: all at once.
    request_rate: float
    prompt_len: int
    output_len: int
    duration: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """The contents of one or more files of results. `serve` may be empty, `samples` is not."""

    model: str
    engine: EngineSettings
    samples: Sequence[StepSample]
    serve: Sequence[ServeResult]


def read_measurements(paths: Sequence[Path]) -> Measurements:
    """Reads the output of `octavo bench throughput --json` and `octavo bench serve --json`, in any order.

    Raises PlanError that names file and line.
    """
    models: dict[str, str] = {}
    engines: list[EngineSettings] = []
    samples: list[StepSample] = []
    serve: list[ServeResult] = []
    for path in paths:
        for number, text in enumerate(_lines(path), 1):
            if not text.strip():
                continue
            where = f"{path}, line {number}"
            try:
                line = json.loads(text)
                if not isinstance(line, dict):
                    raise TypeError("not a JSON object")
                if "steps" in line:
                    # Not checked for clusters: they may serve the model under any name.
                    models.setdefault(line["model"], where)
                    engines.append(EngineSettings(**line["engine_settings"]))
                    samples += _samples(line["steps"])
                elif "request_rate" in line:
                    serve += _serve_results(line)
            except (ValueError, KeyError, TypeError) as error:
                raise PlanError(f"--fit: {where} is not a result of octavo bench: {error!r}") from None
    names = " and ".join(map(str, paths))
    if not samples:
        raise PlanError(f"--fit: {names} holds no measured step; `octavo bench throughput --json` prints them")
    if len(models) > 1:
        found = "; ".join(f"{where}: {model}" for model, where in models.items())
        raise PlanError(f"--fit: results of several models cannot be mixed ({found})")
    return Measurements(model=next(iter(models)), engine=engines[-1], samples=samples, serve=serve)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise PlanError(
            f"--fit: {path}: no such file; `octavo bench throughput --concurrency 1,8,32,64 --json > {path}` makes it"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"--fit: cannot read {path}: {error}") from None


def _samples(steps: dict[str, Any]) -> list[StepSample]:
    if steps["columns"] != list(_COLUMNS):
        raise ValueError(f"its steps have the columns {steps['columns']}, not {list(_COLUMNS)}")
    table = np.array(steps["rows"], np.float64).reshape(-1, len(_COLUMNS))
    return [StepSample(int(row[0]), StepShape(*map(int, row[1:-1])), float(row[-1])) for row in table if row[-1] > 0]


def _serve_results(line: dict[str, Any]) -> list[ServeResult]:
    """The results of a line; none if the run had errors, because then it did less work, or if its lengths or arrivals
    are not those that the line tells."""
    if line["num_errors"] or not line.keys().isdisjoint(("dataset", "burstiness", "ramp")):
        return []
    return [
        ServeResult(
            num_requests=line["num_requests"],
            concurrency=line["concurrency"],
            request_rate=float(line["request_rate"]),
            prompt_len=line["prompt_len"],
            output_len=line["output_len"],
            duration=line["duration_s"],
        )
    ]
