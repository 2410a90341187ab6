"""The engine on a CPU beside the floor that its own linears set, in one run.

    python benchmarks/cpu_engine.py [--json] [--concurrency 1,8,32,64] [--dtype bfloat16] [--threads 2]

SmolLM2-135M, greedy, scheduling core and worker in one process, as `octavo bench throughput`. Prints
- output tokens/s of requests of 128 in, 128 out that begin together, and their share of the GEMM floor: the same
  tokens, prompts counted, at the speed of the fastest linears measured in this run (ours or oneDNN), and nothing else;
- prefill of one prompt of 1,500 tokens, tokens/s, and its share of the floor;
- 16 requests of 1,088 tokens that share 1,024, 32 out, arriving together: seconds, and prompt tokens computed.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence

import torch

from benchmarks.linears import cycle, median_seconds, ways
from configs.options import Options
from octavo.bench.workload import random_prompts
from octavo.engine import Engine, build_engine
from protos import inference_pb2 as pb

LAYERS = 30
LAYER_SHAPES = ((576, 960), (576, 576), (576, 3072), (1536, 576))
HEAD_SHAPE = (576, 49152)
PROMPT, OUTPUT = 128, 128
LONG_PROMPT = 1500
SHARED, OWN, SHARED_OUTPUT, SHARERS = 1024, 64, 32, 16


class Load:
    """Requests to one engine, new numbers and new tokens each time."""

    def __init__(self, options: Options) -> None:
        self.engine: Engine = build_engine(options)
        self._count = 0

    def prompts(self, number: int, length: int) -> list[list[int]]:
        self._count += 1
        return [list(each) for each in random_prompts(number, length, self.engine.model.vocab_size, self._count)]

    def run(self, prompts: Sequence[Sequence[int]], output: int) -> tuple[float, int]:
        """Seconds, and prompt tokens computed, of greedy requests that begin together."""
        sampling = pb.SamplingParams(
            temperature=0.0, top_p=1.0, repetition_penalty=1.0, n=1, ignore_eos=True, max_tokens=output,
            min_tokens=output,
        )  # fmt: skip
        start = time.perf_counter()
        for prompt in prompts:
            self._count += 1
            self.engine.submit(self._count, prompt, sampling)
        computed = 0
        while self.engine.has_work:
            computed += self.engine.step().plan.num_tokens
        # The last token of each is sampled, and not computed.
        return time.perf_counter() - start, computed - len(prompts) * (output - 1)


def gemm_seconds(rows: int, dtype: torch.dtype, *, head: bool) -> float:
    """All linears of the model for so many rows, each by the fastest way."""
    total = 0.0
    for shape, times in (*((shape, LAYERS) for shape in LAYER_SHAPES), *([(HEAD_SHAPE, 1)] if head else [])):
        calls = {name: cycle(path, weights, rows, *shape) for name, (path, weights) in ways([dtype]).items()}
        total += times * min(median_seconds(calls, 0.3).values())
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", default="1,8,32,64")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3, help="medians are of so many")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    concurrencies = [int(each) for each in arguments.concurrency.split(",")]
    with torch.inference_mode():
        prompt_floor = gemm_seconds(512, dtype, head=False) / 512
        token_floors = {rows: gemm_seconds(rows, dtype, head=True) / rows for rows in concurrencies}
    load = Load(Options(dtype=arguments.dtype, worker_threads=arguments.threads))
    load.run(load.prompts(8, 64), 8)

    def show(figure: str, **values: float) -> None:
        rounded = {name: round(value, 3) for name, value in values.items()}
        if arguments.json:
            print(json.dumps({"figure": figure, "dtype": arguments.dtype, "threads": arguments.threads, **rounded}))
        else:
            print(f"{figure:<16}", "  ".join(f"{name} {value:g}" for name, value in rounded.items()), flush=True)

    for rows in concurrencies:
        seconds = statistics.median(load.run(load.prompts(rows, PROMPT), OUTPUT)[0] for _ in range(arguments.rounds))
        floor = 1 / (token_floors[rows] + prompt_floor * PROMPT / OUTPUT)
        rate = rows * OUTPUT / seconds
        show("throughput", concurrency=rows, output_tok_s=rate, gemm_floor_tok_s=floor, share=rate / floor)
    seconds = statistics.median(load.run(load.prompts(1, LONG_PROMPT), 1)[0] for _ in range(arguments.rounds))
    rate = LONG_PROMPT / seconds
    show("prefill", prompt=LONG_PROMPT, tok_s=rate, gemm_floor_tok_s=1 / prompt_floor, share=rate * prompt_floor)
    shared = load.prompts(1, SHARED)[0]
    seconds, computed = load.run([shared + own for own in load.prompts(SHARERS, OWN)], SHARED_OUTPUT)
    show("shared_prefix", requests=SHARERS, seconds=seconds, prompt_tokens_computed=computed)


if __name__ == "__main__":
    main()
