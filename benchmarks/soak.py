"""200 concurrent streams with random cancels and deadlines against a running cluster: nothing may leak.

    octavo up -c configs/local.yaml
    python -m benchmarks.soak --duration 120

Each stream is of random length; a third is cancelled by its client in mid-stream, a third has a deadline that may pass
first. Every one must end in a defined state: finished, cancelled or past its deadline. At the end the schedulers' own
counts must show no running or waiting sequence and no used block: free + cached + used == total with used == 0.
Exits 1 if anything else happened. The seed fixes the workload, not the order of events.
"""

import argparse
import asyncio
import json
import random
import re
import sys
import time
import urllib.request
from collections import Counter

from octavo import AsyncClient, SamplingParams
from octavo.errors import Cancelled, DeadlineExceeded
from octavo.results import Delta, Finished

_GAUGE = re.compile(r"^octavo_(num_requests_running|num_requests_waiting|kv_cache_usage_ratio)(?:\{.*\})? (\S+)$", re.M)


async def one_stream(client: AsyncClient, choose: random.Random) -> str:
    """How one stream ended."""
    kind = choose.choice(["whole", "cancel", "deadline"])
    prompt = [choose.randrange(100, 40_000) for _ in range(choose.randint(1, 200))]
    sampling = SamplingParams(
        temperature=choose.choice([0.0, 0.9]), n=choose.choice([1, 1, 1, 3]), max_tokens=choose.randint(1, 64)
    )
    cancel_after = choose.randint(0, 20) if kind == "cancel" else None
    timeout = choose.uniform(0.05, 20.0) if kind == "deadline" else None
    num_pieces = 0
    try:
        async with client.stream(prompt, sampling, timeout=timeout) as stream:
            async for event in stream:
                if isinstance(event, Finished):
                    return "finished"
                num_pieces += isinstance(event, Delta)
                if cancel_after is not None and num_pieces >= cancel_after:
                    return "left"
    except DeadlineExceeded:
        return "deadline"
    except Cancelled:
        return "cancelled"
    return "ended without a finish"


async def soak(target: str, concurrency: int, duration: float, seed: int) -> Counter[str]:
    """Keeps `concurrency` streams alive for `duration` seconds, then lets the last ones end."""
    ends: Counter[str] = Counter()
    stop_at = time.monotonic() + duration

    async def keep_streaming(client: AsyncClient, index: int) -> None:
        choose = random.Random(f"{seed}/{index}")
        while time.monotonic() < stop_at:
            ends[await one_stream(client, choose)] += 1

    async with AsyncClient(target, timeout=300) as client, asyncio.TaskGroup() as tasks:
        for index in range(concurrency):
            tasks.create_task(keep_streaming(client, index))
    return ends


def leftovers(ports: list[int]) -> dict[str, float]:
    """Running, waiting and used blocks, added up over the schedulers."""
    sums: dict[str, float] = {}
    for port in ports:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            for name, value in _GAUGE.findall(answer.read().decode()):
                sums[name] = sums.get(name, 0.0) + float(value)
    if not sums:
        raise SystemExit(f"the schedulers' metrics on ports {ports} name no gauges")
    return sums


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="localhost:50051")
    parser.add_argument("--scheduler-metrics-ports", default="9091,9092", help="/metrics of each scheduler")
    parser.add_argument("--concurrency", type=int, default=200)
    parser.add_argument("--duration", type=float, default=120.0, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    ports = [int(port) for port in arguments.scheduler_metrics_ports.split(",")]
    start = time.monotonic()
    ends = asyncio.run(soak(arguments.target, arguments.concurrency, arguments.duration, arguments.seed))
    ended = time.monotonic()
    # Clients that left are noticed within a step; the metrics follow within a second.
    left = leftovers(ports)
    while any(left.values()) and time.monotonic() < ended + 10:
        time.sleep(0.2)
        left = leftovers(ports)
    clean = not any(left.values())
    defined = ends.keys() <= {"finished", "left", "deadline", "cancelled"}
    print(json.dumps({"seconds": round(ended - start, 1), "ends": ends, "left_over": left, "clean": clean and defined}))
    sys.exit(0 if clean and defined else 1)


if __name__ == "__main__":
    main()
