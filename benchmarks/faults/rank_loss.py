"""Measures how soon all ranks of a replica leave a step in which one of them is killed, and shows the logged cause.

    python -m benchmarks.faults.rank_loss [--kills 3] [--tokens 40] [--json]

SmolLM2 under `octavo up`, once on three tensor-parallel ranks and once in two stages; while streams decode, a rank is
killed with -9, another one each time. Prints the seconds until the last other rank logs that the epoch is over, and
until the replica is ready again, the cause that the scheduler logs, and whether the streams' tokens equal those of an
undisturbed run. Exits 1 if tokens differ, or if a rank took longer than the 5 s allowed.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.cluster.small_cluster import PROMPTS
from octavo import SamplingParams
from tests.support.streams import say
from tests.support.up import Up

# Flags, and the ranks to kill: every rank of a tensor group, but only the first of two stages, because only the last
# stage waits for another rank in every step.
LAYOUTS = {
    "TP 3": (("--tensor-parallel-size=3",), (0, 1, 2)),
    "PP 2": (("--pipeline-parallel-size=2",), (0,)),
}
MOST_SECONDS = 5.0
_LEFT, _READY, _CAUSE, _PROCESS = " is over: ", "ready for epoch", " has ended: ", " process=scheduler-0"


def main() -> int:
    parser = argparse.ArgumentParser(description="Kills a rank in the middle of a step.")
    parser.add_argument("--kills", type=int, default=3, help="kills in each layout")
    parser.add_argument("--tokens", type=int, default=40, help="tokens of each stream")
    parser.add_argument("--json", action="store_true", help="a line for each kill")
    arguments = parser.parse_args()
    well = True
    for name, (flags, victims) in LAYOUTS.items():
        for measured in _lose_ranks(flags, victims, arguments.kills, arguments.tokens):
            well = well and measured["equal"] and measured["left_s"] <= MOST_SECONDS
            if arguments.json:
                print(json.dumps({"layout": name, **measured}))
            else:
                tokens = "equal" if measured["equal"] else "DIFFER"
                print(
                    f"{name}: rank {measured['rank']} killed; the others left within {measured['left_s']:.2f} s, "
                    f"ready again after {measured['ready_s']:.1f} s, tokens {tokens}; {measured['cause']}"
                )
    return 0 if well else 1


def _lose_ranks(
    flags: tuple[str, ...], victims: tuple[int, ...], num_kills: int, num_tokens: int
) -> list[dict[str, Any]]:
    sampling = [
        SamplingParams(temperature=0.8 * (number % 2), seed=number, max_tokens=num_tokens, ignore_eos=True)
        for number in range(len(PROMPTS))
    ]
    measured = []
    with (
        tempfile.TemporaryDirectory() as directory,
        Up(
            Path(directory),
            *flags,
            "--dtype=float32",
            "--kv-cache-memory=0.05",
            "--worker-threads=1",
            f"--max-restarts={num_kills + 1}",
            real=True,
        ) as up,
        ThreadPoolExecutor(1) as beside,
    ):
        up.wait_for("serving; Ctrl-C to stop")
        num_ranks = len(up.children_of("worker"))
        expected = say(up.port, PROMPTS, sampling, lambda: None)
        for kill in range(num_kills):
            rank = victims[kill % len(victims)]
            begun = threading.Event()
            lost = beside.submit(_lose, up, rank, num_ranks, begun)
            tokens = say(up.port, PROMPTS, sampling, begun.set)
            measured.append({"rank": rank, **lost.result(), "equal": tokens == expected})
    return measured


def _lose(up: Up, rank: int, num_ranks: int, begun: threading.Event) -> dict[str, Any]:
    begun.wait()
    num_lines = len(up.lines)
    num_left, num_ready = (sum(words in line for line in up.lines) for words in (_LEFT, _READY))
    victim = next(each for each in up.children_of("worker") if each.cmdline()[-1] == str(rank))
    began = time.monotonic()
    victim.kill()
    up.wait_for(_LEFT, count=num_left + num_ranks - 1)
    left = time.monotonic() - began
    up.wait_for(_READY, count=num_ready + num_ranks)
    ready = time.monotonic() - began
    causes = [line.partition(_CAUSE)[2].removesuffix(_PROCESS) for line in up.lines[num_lines:] if _CAUSE in line]
    return {"left_s": round(left, 3), "ready_s": round(ready, 2), "cause": "; ".join(causes)}


if __name__ == "__main__":
    sys.exit(main())
