"""Records a real cluster under a mixed load, and replays every plan that its schedulers made.

    python -m benchmarks.scheduler.replay [--duration 120]

`octavo up -c configs/local.yaml --trace` serves random streams (with cancels, deadlines, n > 1) with so few KV blocks
that requests are preempted all the time. Half-way a worker is killed with SIGKILL, so that its scheduler loses an
epoch; then the cluster is stopped, and the traces are replayed. Prints one JSON line; exits 1 unless all plans are
equal, some requests were preempted and an epoch was lost.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import psutil

from benchmarks.cluster.up import LOCAL, serving
from octavo import AsyncClient, SamplingParams
from octavo.client.errors import Cancelled, DeadlineExceeded
from octavo.client.results import Delta, Finished
from scheduler.recording.replay import Replayed, replay
from tests.support.ports import free_port


async def one_stream(client: AsyncClient, choose: random.Random) -> str:
    """Runs one stream; returns how it ended."""
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


async def keep_streams(target: str, concurrency: int, duration: float, seed: int) -> Counter[str]:
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


def record(directory: Path, arguments: argparse.Namespace) -> Counter[str]:
    """Runs cluster and load; returns how the streams ended. The traces are in `directory`."""
    port = free_port()
    with serving(
        *("-c", LOCAL, f"--port={port}", f"--num-blocks-override={arguments.num_blocks}"),
        *(f"--max-num-seqs={arguments.rows}", f"--max-steps-in-flight={arguments.steps_in_flight}"),
        f"--trace={directory}/run.trace",
    ) as (up, _):
        kill = threading.Timer(arguments.duration / 2, kill_worker, (up.pid,))
        kill.start()
        ends = asyncio.run(keep_streams(f"localhost:{port}", arguments.concurrency, arguments.duration, arguments.seed))
        kill.cancel()
    return ends


def kill_worker(launcher: int) -> None:
    """Kills one worker; the launcher starts it again."""
    workers = [each for each in psutil.Process(launcher).children() if each.cmdline()[1:3] == ["-m", "worker"]]
    workers[0].kill()


def summary(replayed: list[Replayed], ends: Counter[str], seconds: float) -> dict[str, object]:
    def total(name: str) -> int:
        return sum(getattr(each, name) for each in replayed)

    differences = [f"{each.path.name}: {each.difference}" for each in replayed if each.difference is not None]
    return {
        "seconds_recorded": round(max(each.seconds for each in replayed), 1),
        "streams": sum(ends.values()),
        "ends": ends,
        "traces": len(replayed),
        "mib": round(sum(each.path.stat().st_size for each in replayed) / 2**20, 2),
        "requests": total("num_requests"),
        "calls": total("num_calls"),
        "plans": total("num_plans"),
        "tokens": total("num_tokens"),
        "preemptions": total("num_preemptions"),
        "epochs_lost": total("num_epochs_lost"),
        "torn_bytes": total("num_torn_bytes"),
        "replay_seconds": round(seconds, 2),
        "plans_per_second": round(total("num_plans") / seconds),
        "differences": differences,
        "equal": not differences,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--duration", type=float, default=120.0, help="seconds of load")
    parser.add_argument("--concurrency", type=int, default=24)
    parser.add_argument("--rows", type=int, default=8, help="max_num_seqs of each replica")
    parser.add_argument("--num-blocks", type=int, default=24, help="KV blocks of each replica")
    parser.add_argument("--steps-in-flight", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        ends = record(Path(directory), arguments)
        began = time.perf_counter()
        # Replays each replica by itself, so that a difference in one does not hide another's.
        replayed = [
            outcome
            for path in sorted(Path(directory).glob("run.*.trace"))
            for outcome in replay(each for each in (path, Path(f"{path}.1")) if each.exists())
        ]
        line = summary(replayed, ends, time.perf_counter() - began)
    print(json.dumps(line))
    sys.exit(0 if line["equal"] and line["preemptions"] and line["epochs_lost"] else 1)


if __name__ == "__main__":
    main()
