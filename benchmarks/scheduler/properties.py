"""Runs random walks over the scheduling core, in search of a violated invariant.

    python -m benchmarks.scheduler.properties --steps 1000000 [--jobs 2] [--seed 0]

Each walk draws settings (policy, chunking, preemption mode and rule, steps in flight, stages, drafts, pool sizes, the
cache of items) and a load, and checks the invariants of tests/properties/world.py and plan_checks.py after every step.
Prints one JSON line at the end: {steps, walks, seconds, failures, seen}, where `seen` counts how often each feature
occurred. Exits 1 if an invariant broke; the failure names the seed of its walk, which `--walk SEED` runs again.
"""

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from tests.properties.walk import WalkError, walk

# Walks between two lines of a job.
_WALKS_A_LINE = 20


def run_job(seed: int, steps: int, first: int, stride: int) -> None:
    """Walks first, first + stride, ... Prints a line of JSON now and then: the results since the previous line."""
    index, remaining = first, steps
    while remaining > 0:
        seen: Counter[str] = Counter()
        num_steps = num_walks = 0
        failures: list[str] = []
        while num_walks < _WALKS_A_LINE and num_steps < remaining:
            try:
                each = walk(f"{seed}/{index}")
                num_steps += each.num_steps
                seen += each.seen
            except WalkError as error:
                failures.append(str(error))
            num_walks += 1
            index += stride
        remaining -= num_steps
        print(json.dumps({"steps": num_steps, "walks": num_walks, "failures": failures, "seen": seen}), flush=True)
        if failures:
            return


def run_all(seed: int, steps: int, jobs: int) -> dict[str, object]:
    begin = time.monotonic()
    command = [sys.executable, str(Path(__file__).resolve()), "--seed", str(seed), "--jobs", str(jobs)]
    processes = [
        subprocess.Popen(
            [*command, "--steps", str(-(-steps // jobs)), "--job", str(job)], stdout=subprocess.PIPE, text=True
        )
        for job in range(jobs)
    ]
    seen: Counter[str] = Counter()
    failures: list[str] = []
    num_walks = num_steps = 0
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("steps", total=steps)
        # Reads a line of each in turn: the jobs are equally fast, and a faster one's line waits in its pipe.
        open_jobs = list(processes)
        while open_jobs:
            for process in list(open_jobs):
                assert process.stdout is not None
                line = process.stdout.readline()
                if not line:
                    open_jobs.remove(process)
                    continue
                report = json.loads(line)
                num_walks += report["walks"]
                num_steps += report["steps"]
                failures += report["failures"]
                seen.update(report["seen"])
                progress.update(task, completed=num_steps)
    failures += [
        f"job {job} ended with exit code {code}" for job, each in enumerate(processes) if (code := each.wait())
    ]
    seconds = round(time.monotonic() - begin, 1)
    return {
        "steps": num_steps,
        "walks": num_walks,
        "seconds": seconds,
        "failures": failures,
        "seen": dict(sorted(seen.items())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000, help="plans in all (default: a million)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--walk", help="run one walk again, and show where it breaks")
    parser.add_argument("--job", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.walk is not None:
        print(json.dumps({"steps": walk(arguments.walk).num_steps}))
    elif arguments.job is not None:
        run_job(arguments.seed, arguments.steps, arguments.job, arguments.jobs)
    else:
        report = run_all(arguments.seed, arguments.steps, arguments.jobs)
        print(json.dumps(report))
        sys.exit(1 if report["failures"] else 0)


if __name__ == "__main__":
    main()
