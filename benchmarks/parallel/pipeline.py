"""Compares SmolLM2 in one stage and in several: equal greedy tokens, their rate, and how busy each stage is.

    python -m benchmarks.parallel.pipeline [--stages 1,2] [--layers 19,11] [--tokens 32] [--streams 6] [--json]

Each is a cluster of one replica, `octavo up` with real processes. Exits 1 if tokens differ. Two simulated stages come
first; their steps take 50 ms each and no core, to show how much a pipeline idles when every stage has its own cores.
On a machine with few cores, stages take them from each other and from the rest of the cluster.
"""

import argparse
import asyncio
import json
import logging
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.cluster.small_cluster import cluster, say
from tests.support.models.busy_stages import busy_shares

_METRICS_PORT = 50970
# Metrics ports of workers come after the router's and the scheduler's.
_FIRST_WORKER = 2


def main() -> int:
    parser = argparse.ArgumentParser(description="Compares one stage with several.")
    parser.add_argument("--stages", default="1,2", help="pipeline_parallel_size of each cluster, comma-separated")
    parser.add_argument(
        "--layers",
        default="19,11",
        help="pipeline_layers for as many stages; the default makes up for the last stage's head",
    )
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each stream")
    parser.add_argument("--streams", type=int, default=6, help="concurrent streams")
    parser.add_argument("--port", type=int, default=50962)
    parser.add_argument("--json", action="store_true", help="a line for each cluster")
    arguments = parser.parse_args()
    # The simulated scheduler warns about workers that have ended.
    logging.disable()
    _show_simulated(arguments.json)
    said: list[list[tuple[int, ...]]] = []
    for num_stages in map(int, arguments.stages.split(",")):
        flags = [f"--pipeline-parallel-size={num_stages}"]
        if len(arguments.layers.split(",")) == num_stages:
            flags.append(f"--pipeline-layers={arguments.layers}")
        with cluster(arguments.port, *flags, metrics_port=_METRICS_PORT):
            # Caches the prompts' prefixes, so that decoding is what is measured.
            say(arguments.port, arguments.streams, 2)
            before, began = [_computing(rank) for rank in range(num_stages)], time.perf_counter()
            tokens, seconds = say(arguments.port, arguments.streams, arguments.tokens)
            passed = time.perf_counter() - began
            shares = [(_computing(rank) - before[rank]) / passed for rank in range(num_stages)]
        said.append(tokens)
        rate, is_equal = arguments.streams * arguments.tokens / seconds, tokens == said[0]
        if arguments.json:
            line = {"pipeline_parallel_size": num_stages, "tokens_per_s": round(rate, 2), "equal": is_equal}
            print(json.dumps({**line, "busy": [round(share, 3) for share in shares]}))
        else:
            print(
                f"pipeline_parallel_size {num_stages}: {rate:6.1f} tokens/s, tokens "
                f"{'equal' if is_equal else 'DIFFER'}, busy {_percent(shares)}"
            )
    return 0 if all(tokens == said[0] for tokens in said) else 1


def _show_simulated(as_json: bool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        shares = [sum(each) / len(each) for each in asyncio.run(busy_shares(Path(directory), 24))]
    if as_json:
        print(json.dumps({"simulated": "2 stages of 50 ms", "busy": [round(share, 3) for share in shares]}))
    else:
        print(f"two stages of 50 ms a step: busy {_percent(shares)}")


def _percent(shares: list[float]) -> str:
    return ", ".join(f"{share:.0%}" for share in shares)


def _computing(rank: int) -> float:
    """Seconds that a worker has spent in forward passes and in sampling."""
    with urllib.request.urlopen(
        f"http://127.0.0.1:{_METRICS_PORT + _FIRST_WORKER + rank}/metrics", timeout=5
    ) as answer:
        text = answer.read().decode()
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "octavo_worker_step_part_seconds_total" and sample.labels["part"] in ("forward", "sample")
    )


if __name__ == "__main__":
    sys.exit(main())
