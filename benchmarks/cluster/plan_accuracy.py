"""Checks the predictions of `octavo plan` against a cluster on this machine.

    python -m benchmarks.cluster.plan_accuracy [--output DIR]

Some runs fit the cost model: the engine alone at concurrencies 1 to 48 (`octavo bench throughput`), and the local
cluster (configs/local.yaml: a router and two replicas) at concurrencies 2 to 48. Others are held out and predicted: the
cluster's output tokens a second at concurrencies 8, 32 and 64, and with five values of max_num_batched_tokens, each
measured three times. At each concurrency the prediction must be within 15% of the median. Two budgets whose medians
differ by more than 10% must be predicted in the right order. Exits with 1 if not.

Takes some ten minutes; nothing else should run meanwhile. The measurements go to DIR, by default a folder of the day in
benchmarks/results/.
"""

import argparse
import datetime
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.cluster.up import LOCAL, OCTAVO, ROOT, serving

NUM_REPEATS = 3
TOLERANCE = 0.15
# Two budgets whose medians differ by less may be predicted in either order.
MIN_DIFFERENCE = 0.10

PROMPT_LEN, OUTPUT_LEN = 96, 48
FIT_CONCURRENCIES, HELD_OUT_CONCURRENCIES = (2, 4, 16, 48), (8, 32, 64)
# Long prompts and short outputs: there the budget matters.
BUDGETS = (16, 32, 64, 256, 1024)
BUDGET_PROMPT_LEN, BUDGET_OUTPUT_LEN, BUDGET_CONCURRENCY, BUDGET_REQUESTS = 256, 16, 12, 24
# Engine runs: concurrencies and budget. The later runs add the small chunks that the first lacks.
ENGINE_RUNS = (("1,4,16,48", 2048), ("6", 96), ("6", 48), ("4", 24), ("3", 12))

Line = dict[str, Any]


def octavo(*arguments: object) -> list[Line]:
    """Runs a command with --json and returns the lines that it prints."""
    command = [OCTAVO, *map(str, arguments), "--json"]
    printed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    return [json.loads(line) for line in printed.splitlines()]


@contextmanager
def cluster(*options: object) -> Iterator[str]:
    """Runs the local cluster; yields its address."""
    with serving("-c", LOCAL, "--port=0", *options) as (_, lines):
        addresses = [found[1] for line in lines if (found := re.search(r"gRPC\s+(\S+:\d+)", line))]
        serve(addresses[-1], concurrency=4, num_requests=4, prompt_len=PROMPT_LEN, output_len=4)
        yield addresses[-1]


def workload(*, concurrency: int, num_requests: int, prompt_len: int, output_len: int) -> tuple[object, ...]:
    """Flags that `octavo bench serve` and `octavo plan` have in common."""
    return (
        *("--concurrency", concurrency, "--num-requests", num_requests),
        *("--prompt-len", prompt_len, "--output-len", output_len),
    )


def serve(address: str, *, seed: int = 0, **load: int) -> Line:
    (line,) = octavo("bench", "serve", "--target", address, "--seed", seed, *workload(**load))
    assert not line["num_errors"], line
    return line


def load_at(concurrency: int) -> dict[str, int]:
    return {
        "concurrency": concurrency,
        "num_requests": 2 * concurrency,
        "prompt_len": PROMPT_LEN,
        "output_len": OUTPUT_LEN,
    }


BUDGET_LOAD = {
    "concurrency": BUDGET_CONCURRENCY,
    "num_requests": BUDGET_REQUESTS,
    "prompt_len": BUDGET_PROMPT_LEN,
    "output_len": BUDGET_OUTPUT_LEN,
}


def measure_engine(threads: int) -> list[Line]:
    lines = []
    for concurrencies, budget in ENGINE_RUNS:
        say(f"engine at concurrency {concurrencies}, max_num_batched_tokens={budget}")
        lines += octavo(
            *("bench", "throughput", "--concurrency", concurrencies, "--max-num-batched-tokens", budget),
            *("--worker-threads", threads, "--prompt-len", PROMPT_LEN, "--output-len", OUTPUT_LEN),
        )
    return lines


def measure_cluster() -> tuple[list[Line], list[Line]]:
    """Returns the runs for the fit and the runs to predict; held_out of the latter is the varied option and its value.

    Each repeat measures everything once, so that a slow phase of the machine affects all alike.
    """
    fit, held_out = [], []
    for repeat in range(NUM_REPEATS):
        with cluster() as address:
            for concurrency in sorted((*FIT_CONCURRENCIES, *HELD_OUT_CONCURRENCIES)):
                say(f"cluster at concurrency {concurrency}, {repeat + 1} of {NUM_REPEATS}")
                line = serve(address, seed=100 * concurrency + repeat, **load_at(concurrency))
                if concurrency in FIT_CONCURRENCIES:
                    fit.append(line)
                else:
                    held_out.append({"held_out": ["concurrency", concurrency], **line})
        for budget in BUDGETS:
            with cluster("--max-num-batched-tokens", budget) as address:
                say(f"cluster with max_num_batched_tokens={budget}, {repeat + 1} of {NUM_REPEATS}")
                line = serve(address, seed=repeat, **BUDGET_LOAD)
                held_out.append({"held_out": ["max_num_batched_tokens", budget], **line})
    return fit, held_out


def compare(name: str, value: int, measured: list[Line], predicted: Line) -> Line:
    """One line of the result."""
    rates = [line["output_tok_s"] for line in measured]
    median = statistics.median(rates)
    return {
        "benchmark": "plan_accuracy",
        name: value,
        "predicted_tok_s": predicted["output_tok_s"],
        "measured_tok_s": median,
        "ratio": round(predicted["output_tok_s"] / median, 4),
        "measured_runs_tok_s": rates,
        "predicted_itl_ms_p50": predicted["itl_ms_p50"],
        "measured_itl_ms_p50": statistics.median(line["itl_ms_p50"] for line in measured),
    }


def misordered(results: list[Line]) -> list[str]:
    """Pairs whose medians differ by more than MIN_DIFFERENCE and whose predictions are not in the same order."""
    wrong = []
    for one, other in itertools.combinations(results, 2):
        low, high = sorted((one, other), key=lambda line: line["measured_tok_s"])
        clear = high["measured_tok_s"] > (1 + MIN_DIFFERENCE) * low["measured_tok_s"]
        if clear and high["predicted_tok_s"] <= low["predicted_tok_s"]:
            wrong.append(f"{high['max_num_batched_tokens']} over {low['max_num_batched_tokens']}")
    return wrong


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def write(path: Path, lines: list[Line]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = len(os.sched_getaffinity(0))
    folder = ROOT / "benchmarks" / "results" / f"{datetime.date.today()}-{cores}core"
    parser.add_argument("--output", type=Path, default=folder, metavar="DIR", help="where the raw results go")
    parser.add_argument("--reuse", action="store_true", help="predict from the runs already in DIR, without new ones")
    arguments = parser.parse_args()
    fit_file, runs_file = arguments.output / "plan_fit.jsonl", arguments.output / "plan_held_out.jsonl"
    if not arguments.reuse:
        arguments.output.mkdir(parents=True, exist_ok=True)
        # The cluster's two workers share the cores.
        engine = measure_engine(max(1, cores // 2))
        of_cluster, held_out = measure_cluster()
        write(fit_file, engine + of_cluster)
        write(runs_file, held_out)
    runs: dict[tuple[str, int], list[Line]] = {}
    for run in map(json.loads, runs_file.read_text().splitlines()):
        runs.setdefault(tuple(run["held_out"]), []).append(run)
    results = []
    for (name, value), measured in runs.items():
        load, options = load_at(value), ()
        if name != "concurrency":
            load, options = BUDGET_LOAD, (f"--{name}", value)
        (predicted,) = octavo("plan", "-c", LOCAL, "--fit", fit_file, *workload(**load), *options)
        results.append(compare(name, value, measured, predicted))
    write(arguments.output / "plan_accuracy.jsonl", results)
    for result in results:
        print(json.dumps(result))
    off = [line for line in results if "concurrency" in line and abs(line["ratio"] - 1) > TOLERANCE]
    wrong = misordered([line for line in results if "max_num_batched_tokens" in line])
    for line in off:
        say(f"concurrency {line['concurrency']}: the prediction is off by {line['ratio'] - 1:+.1%}")
    for pair in wrong:
        say(f"max_num_batched_tokens: measured {pair}, predicted the other way round")
    sys.exit(1 if off or wrong else 0)


if __name__ == "__main__":
    main()
