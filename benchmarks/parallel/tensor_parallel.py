"""Compares SmolLM2 on one rank and on several: equal greedy tokens, and their rate.

    python -m benchmarks.parallel.tensor_parallel [--sizes 1,3] [--tokens 32] [--streams 4] [--json]

Each size is a cluster of one replica, `octavo up` with real processes. Exits 1 if tokens differ. Ranks share the cores,
so on a machine with few cores more ranks are slower; the run shows that tokens are equal, and what a step's sums cost.
"""

import argparse
import json
import sys

from benchmarks.cluster.small_cluster import PROMPTS, cluster, say


def main() -> int:
    parser = argparse.ArgumentParser(description="Compares one rank with several.")
    parser.add_argument("--sizes", default="1,3", help="tensor_parallel_size of each cluster, comma-separated")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each stream")
    parser.add_argument("--streams", type=int, default=len(PROMPTS), help="concurrent streams")
    parser.add_argument("--port", type=int, default=50961)
    parser.add_argument("--json", action="store_true", help="a line for each size")
    arguments = parser.parse_args()
    said: list[list[tuple[int, ...]]] = []
    for size in map(int, arguments.sizes.split(",")):
        with cluster(arguments.port, f"--tensor-parallel-size={size}"):
            tokens, seconds = say(arguments.port, arguments.streams, arguments.tokens)
        said.append(tokens)
        rate, is_equal = arguments.streams * arguments.tokens / seconds, tokens == said[0]
        if arguments.json:
            print(json.dumps({"tensor_parallel_size": size, "tokens_per_s": round(rate, 2), "equal": is_equal}))
        else:
            print(f"tensor_parallel_size {size}: {rate:6.1f} tokens/s, tokens {'equal' if is_equal else 'DIFFER'}")
    return 0 if all(tokens == said[0] for tokens in said) else 1


if __name__ == "__main__":
    sys.exit(main())
