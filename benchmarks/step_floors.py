"""The ops of a decode step beside what they cannot take less than, on this machine, in this run."""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.machine_peaks import MachinePeaks
from kernels.native import NativeKernels
from kernels.native.library import LinearStruct
from kernels.native.recording import KernelTimes, Op
from protos import inference_pb2, step_pb2
from worker.kv_cache import KVCache
from worker.rows import Rows
from worker.runner import Runner
from worker.weights import LoadedModel

# kFloat32, kBfloat16, kInt8, kGroupedInt8, kInt4 of kernels/linear/panels.h: what is multiplied, the best that a
# machine has. AVX2 multiplies bf16 and 8-bit weights as 16-bit integers.
_MULTIPLIED = (("float32",), ("bfloat16", "int16"), ("int8", "int16"), ("int8", "int16"), ("int8", "int8_pairs"))

_OP_NAMES = {
    Op.ATTENTION: "attention",
    Op.ROPE_CACHE_WRITE: "rope, cache write",
    Op.EMBEDDING: "embeddings",
    Op.ROPE_TURNS: "rope turns",
    Op.PLAN_ATTENTION: "attention plan",
    Op.ZERO: "zeros",
    Op.ADD_RMS_NORM: "norms of what is added",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCost:
    """Of one step, in milliseconds."""

    name: str
    measured: float
    # What it cannot take less than, and why: memory, arithmetic, or nothing that counts.
    floor: float = 0.0
    bound: str = ""


def decode_costs(
    loaded: LoadedModel,
    peaks: MachinePeaks,
    *,
    num_rows: int,
    context: int,
    block_size: int,
    kv_dtype: torch.dtype,
    num_steps: int,
) -> list[OpCost]:
    """Medians over greedy decode steps of so many rows: the whole step first, then its ops, then all else, which is
    Python and small ops of PyTorch and numpy."""
    kernels = loaded.model.path.native
    if kernels is None:
        raise RuntimeError("floors are known for the C++ kernels, which this machine has not")
    runner = _runner(loaded, num_rows, context + num_steps + 8, block_size, kv_dtype)
    last, steps = KernelTimes(), list[dict[str, float]]()
    for number, plan in enumerate(_plans(num_rows, context, block_size, num_steps + 3)):
        with kernels.measuring() as times:
            start = time.perf_counter()
            runner.execute(plan)
            total = time.perf_counter() - start
        last = times
        if number >= 3:  # the first ones make buffers, and wake threads
            ops = _by_name(times)
            steps.append({"step": total, **ops, "Python and the rest": total - sum(ops.values())})
    measured = {name: statistics.median(step[name] for step in steps) * 1e3 for name in steps[0]}
    floors = _floors(last, loaded, kernels, peaks, num_rows, context + num_steps // 2, kv_dtype)
    # A step is no faster than its ops, each by its own bound.
    whole = OpCost(name="step", measured=measured.pop("step"), floor=sum(max(floor) for floor in floors.values()))
    costs = [whole]
    for name, value in measured.items():
        memory, arithmetic = floors.get(name, (0.0, 0.0))
        floor = max(memory, arithmetic)
        bound = "" if not floor else "memory" if memory >= arithmetic else "arithmetic"
        costs.append(OpCost(name=name, measured=value, floor=floor, bound=bound))
    return costs


def _runner(loaded: LoadedModel, num_rows: int, length: int, block_size: int, kv_dtype: torch.dtype) -> Runner:
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
    kv_cache = KVCache(loaded.config, num_blocks=num_blocks + 1, block_size=block_size, path=loaded.model.path)
    for layer in kv_cache.layers:
        layer.normal_(generator=torch.Generator().manual_seed(0))
    return Runner(loaded.model, kv_cache, rows, inference_pb2.ModelInfo())


def _plans(num_rows: int, context: int, block_size: int, num_steps: int) -> Iterator[step_pb2.StepPlan]:
    """Rows whose contexts are in the cache already, in blocks of random order, and decode from there on."""
    num_blocks = -(-(context + num_steps + 1) // block_size)
    generator = torch.Generator().manual_seed(0)
    blocks = (torch.randperm(num_rows * num_blocks, generator=generator) + 1).view(num_rows, num_blocks).tolist()
    new_rows = [
        step_pb2.NewRow(
            row=row, sequence=row + 1, token_ids=[1] * (context + 1), num_prompt_tokens=context + 1,
            num_computed_tokens=context, block_ids=blocks[row], sampling=inference_pb2.SamplingParams(),
        )
        for row in range(num_rows)
    ]  # fmt: skip
    yield step_pb2.StepPlan(step=1, new_rows=new_rows, rows=range(num_rows), num_tokens=[1] * num_rows)
    decode_rows = b"".join(row.to_bytes(2, "little") for row in range(num_rows))
    for step in range(2, num_steps + 1):
        yield step_pb2.StepPlan(step=step, decode_rows=decode_rows)


def _by_name(times: KernelTimes) -> dict[str, float]:
    seconds: defaultdict[str, float] = defaultdict(float)
    for (op, address), taken in times.seconds.items():
        seconds[_name(op, address)] += taken
    return dict(seconds)


def _name(op: Op, address: int) -> str:
    if op is not Op.LINEAR:
        return _OP_NAMES[op]
    linear = LinearStruct.from_address(address)
    gate = ", gated" if linear.gated else ""
    return f"linear {linear.inputs} -> {linear.outputs}{gate}"


def _floors(
    times: KernelTimes,
    loaded: LoadedModel,
    kernels: NativeKernels,
    peaks: MachinePeaks,
    num_rows: int,
    context: int,
    kv_dtype: torch.dtype,
) -> defaultdict[str, tuple[float, float]]:
    """Milliseconds of memory and arithmetic, by name."""
    floors: defaultdict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))

    def add(name: str, num_bytes: float, operations: float, rate: float) -> None:
        memory, arithmetic = floors[name]
        floors[name] = (memory + num_bytes / peaks.read * 1e3, arithmetic + operations / rate * 1e3)

    for op, address in times.seconds:
        if op is Op.LINEAR:
            linear = LinearStruct.from_address(address)
            operations = 2.0 * num_rows * linear.inputs * linear.outputs * (2 if linear.gated else 1)
            kinds = [kind for kind in _MULTIPLIED[linear.weights] if kind in peaks.operations]
            add(_name(op, address), kernels.packed_bytes(address), operations, peaks.operations[kinds[0]])
    config, name = loaded.config, _name(Op.ATTENTION, 0)
    keys = float(num_rows * context * config.num_layers)
    num_bytes = keys * 2 * config.num_kv_heads * config.head_size * kv_dtype.itemsize
    add(name, num_bytes, keys * 4 * config.num_heads * config.head_size, peaks.operations["float32"])
    return floors
