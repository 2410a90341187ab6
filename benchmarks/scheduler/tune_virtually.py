"""Compares what `octavo tune` chooses with the best of the whole grid, on clusters of a virtual clock.

    python -m benchmarks.scheduler.tune_virtually
    python -m benchmarks.scheduler.tune_virtually --noise 0.1 --seeds 10 --json

As benchmarks.scheduler.tune_and_grid, but steps only take the time that a formula says, so that the truth is known and
noise can be chosen: each measurement's times are multiplied by a factor of this standard deviation. The scheduler's
core plans every step. A start of a cluster counts as --start seconds. Prints for each workload, over all seeds, the
median and the worst ratio of the chosen setting's true throughput within the bounds to that of the best of 25 settings,
the same of the setting that the exhaustive search chooses from equally noisy measurements, and the share of its time.
Takes a minute a seed.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.bench.datasets.chosen import choose
from octavo.lab.bounds import Bounds, lasting
from octavo.lab.flags import DatasetKind, LoadFlags
from octavo.lab.journal import Journal
from octavo.lab.settings import Setting, grid
from octavo.tune.progress import Progress
from octavo.tune.rates import highest_rate
from octavo.tune.search.results import Found
from octavo.tune.search.tuner import Effort, Tuner
from octavo.tune.workload import TuneWorkload
from tests.support.scheduler.plan import LinearCost
from tests.support.scheduler.simulated_clusters import SimulatedClusters

# About SmolLM2-135M on two cores with AMX.
_COST = LinearCost(step=0.016, token=0.00035)
_ROWS, _BUDGETS = (4, 8, 16, 32, 64), (64, 128, 256, 512, 1024)
_WORKLOADS: Mapping[str, tuple[dict[str, Any], Bounds]] = {
    "random": ({"prompt_len": "uniform:64:192", "output_len": "uniform:16:64"}, Bounds(itl_ms=100.0)),
    "prefix": (
        {
            "dataset": DatasetKind.PREFIXES,
            "prefix_len": 240,
            "num_prefixes": 1,
            "prompt_len": "400",
            "output_len": "32",
        },
        Bounds(ttft_ms=700.0, min_hit_rate=0.5),
    ),
    "chat": ({"prompt_len": "lognormal:60:0.7", "output_len": "lognormal:60:0.7"}, Bounds(e2e_ms=5000.0)),
}


def workload_of(name: str) -> TuneWorkload:
    return TuneWorkload(
        dataset=choose(LoadFlags(**_WORKLOADS[name][0])), num_requests=48, vocab_size=10_000, max_model_len=512
    )


def tune(name: str, effort: Effort, noise: float, seed: int, start: float) -> tuple[Found, float]:
    """Returns what was found, and the seconds of the virtual clock."""
    clusters = SimulatedClusters(lambda options: _COST, noise=noise, seed=seed)
    with tempfile.TemporaryDirectory() as directory, Progress(hidden=True) as watcher:
        journal = Journal(Path(directory) / "state.jsonl", {}, advice="")
        tuner = Tuner(
            _grid(),
            workload_of(name),
            _WORKLOADS[name][1],
            effort,
            clusters=clusters,
            journal=journal,
            traces=Path(directory) / "traces",
            watcher=watcher,
        )
        try:
            found = tuner.run(None)
        finally:
            journal.close()
    return found, clusters.seconds + start * clusters.num_starts


def _grid() -> list[Setting]:
    return grid({"max_num_seqs": _ROWS, "max_num_batched_tokens": _BUDGETS})


def truth(name: str) -> dict[Setting, float]:
    """The throughput within the bounds of every setting, without noise and by a fine search."""
    workload, bounds = workload_of(name), _WORKLOADS[name][1]
    clusters = SimulatedClusters(lambda options: _COST, noise=0.0)
    found = {}
    for setting in _grid():
        with clusters.open(setting, {}) as cluster:
            best = highest_rate(
                lambda rate, cluster=cluster: cluster.measure(workload.load(rate)), bounds, max_runs=15, close=1.01
            )
        found[setting] = 0.0 if best.rate is None else lasting(best.rate, best.measured)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--noise", type=float, default=0.05, help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--start", type=float, default=5.0, metavar="S", help="default: %(default)s")
    parser.add_argument("--max-measured", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--workloads", type=lambda text: text.split(","), default=[*_WORKLOADS], metavar="NAME,NAME")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    for name in arguments.workloads:
        true = truth(name)
        best = max(true.values())
        ratios: dict[str, list[float]] = {"tuned": [], "grid": []}
        shares = []
        for seed in range(arguments.seeds):
            tuned, tune_s = tune(
                name, Effort(max_measured=arguments.max_measured), arguments.noise, 2 * seed, arguments.start
            )
            whole, grid_s = tune(name, Effort(is_exhaustive=True), arguments.noise, 2 * seed + 1, arguments.start)
            for key, found in (("tuned", tuned), ("grid", whole)):
                ratios[key].append(true[found.best.setting] / best if found.best else 0.0)
            shares.append(tune_s / grid_s)
        line = {
            "workload": name,
            "noise": arguments.noise,
            "seeds": arguments.seeds,
            "settings": len(true),
            "settings_within_3_percent": sum(value >= 0.97 * best for value in true.values()),
            **{f"{key}_over_best_median": round(statistics.median(each), 4) for key, each in ratios.items()},
            **{f"{key}_over_best_worst": round(min(each), 4) for key, each in ratios.items()},
            "share_of_time_median": round(statistics.median(shares), 3),
            "share_of_time_most": round(max(shares), 3),
        }
        print(json.dumps(line) if arguments.json else line, flush=True)


if __name__ == "__main__":
    main()
