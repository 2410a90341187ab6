"""The steps of `octavo tune` and `octavo bench sweep`, from the flags to what they leave."""

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from configs.load import load_options
from configs.options import Options
from octavo.bench.datasets.chosen import DEFAULT_LEN, choose
from octavo.doctor.machine import Machine
from octavo.lab.errors import TuningError
from octavo.lab.flags import DatasetKind, LoadFlags
from octavo.lab.journal import Journal
from octavo.lab.settings import OFF, GivenOptions, Setting, grid, parse_assignments, parse_axis
from octavo.plan.costs.model_shape import read_shape
from octavo.reports import print_json
from octavo.tune.flags import OWN, SweepFlags, TuneFlags
from octavo.tune.profiling import profile
from octavo.tune.progress import Progress
from octavo.tune.report import PAGE, Report
from octavo.tune.search.results import Found
from octavo.tune.search.tuner import LEAST_SHARE, Effort, Tuner
from octavo.tune.sweep import draw, print_rows, sweep, write_table
from octavo.tune.trials.clusters import LocalClusters
from octavo.tune.trials.memory import MemoryRange, memory_values
from octavo.tune.trials.trials import Trials
from octavo.tune.workload import TuneWorkload
from runtime.model_files import resolve_model
from runtime.wire import octavo_version

_STATE, _TRACES, _LOGS, _PROFILE = "state.jsonl", "traces", "logs", "profile.json.gz"
_TABLE, _PLOT = "sweep.csv", "sweep.png"
_MEMORY_OPTIONS = ("kv_cache_memory", "gpu_memory_utilization", "num_blocks_override")


def run_tune(query: TuneFlags, load: LoadFlags, given: GivenOptions, *, command: str) -> bool:
    """Tunes, and writes the report into the output folder. Returns False if no setting keeps the bounds.

    command: as it was typed. Raises ConfigError, ModelNotFoundError, and KeyboardInterrupt: the same command then goes
    on where it stopped.
    """
    base = given.options()
    resolve_model(base.model)
    axes = {name: parse_axis(text, name) for name, text in query.axes.items() if text}
    settings = grid({**default_axes(base), **axes})
    workload = workload_of(load, query.num_requests, base, hit_rate=query.min_prefix_hit_rate)
    clusters = LocalClusters(given, query.output / _LOGS)
    effort = Effort(
        margin=query.margin, max_measured=query.max_measured, rounds=query.rounds, is_exhaustive=query.exhaustive
    )
    common = {
        "settings": [setting.key for setting in settings],
        "bounds": query.bounds.as_json(),
        "exhaustive": query.exhaustive,
    }
    journal = _open_journal(query, load, base, common)
    with Progress(hidden=query.as_json) as watcher:
        if journal.num_kept:
            watcher.say(f"going on with {journal.num_kept} results of {journal.path}")
        tuner = Tuner(
            settings,
            workload,
            query.bounds,
            effort,
            clusters=clusters,
            journal=journal,
            traces=query.output / _TRACES,
            watcher=watcher,
        )
        try:
            found = tuner.run(_memory(base, settings, clusters, workload))
            report = _report(query, given, found, journal, watcher, workload, command)
        finally:
            journal.close()
    report.write(query.output)
    if query.as_json:
        print_json(report.as_json())
    else:
        console = Console(highlight=False)
        report.print(console)
        if report.options:
            console.print(report.yaml(), markup=False, soft_wrap=True, style="green")
        console.print(f"{query.output / PAGE}", soft_wrap=True)
    return found.best is not None


def run_sweep(query: SweepFlags, load: LoadFlags, given: GivenOptions, rates: list[float]) -> bool:
    """Measures, and writes table and plot into the output folder. Returns False if a setting failed.

    Raises ConfigError, ModelNotFoundError, and KeyboardInterrupt: the same command then goes on where it stopped.
    """
    base = given.options()
    resolve_model(base.model)
    settings = grid(parse_assignments(query.assignments or (), "--set"))
    clusters = LocalClusters(given, query.output / _LOGS)
    for setting in settings:
        # Values that can't be are an error now, not hours later.
        clusters.options(setting, {})
    workload = workload_of(load, query.num_requests, base)
    journal = _open_journal(query, load, base, {})
    try:
        with Progress(hidden=query.as_json) as progress:
            trials = Trials(clusters, journal, workload)
            rows = sweep(settings, rates, query.num_runs, trials, progress)
    finally:
        journal.close()
    write_table(query.output / _TABLE, rows)
    if any(row.numbers for row in rows):
        draw(query.output / _PLOT, rows, title=f"{base.model}, {len(workload.requests(1.0))} requests")
    elif not query.as_json:
        raise TuningError(f"no setting works; the first: {rows[0].error}")
    if query.as_json:
        for row in rows:
            print_json(row.as_json())
    else:
        print_rows(rows)
        Console(highlight=False).print(f"{query.output / _TABLE}, {query.output / _PLOT}", soft_wrap=True)
    return not any(row.error for row in rows)


def default_axes(options: Options) -> dict[str, tuple[int, ...]]:
    """The guide's grid: a quarter, half, once and twice the option for rows, and for the budget of a step."""
    least = {"max_num_seqs": 1, "max_num_batched_tokens": 16}
    return {
        name: tuple(dict.fromkeys(max(low, getattr(options, name) * factor // 4) for factor in (1, 2, 4, 8)))
        for name, low in least.items()
    }


def workload_of(load: LoadFlags, num_requests: int, base: Options, *, hit_rate: float = 0.0) -> TuneWorkload:
    """hit_rate: share of the prompts' tokens that the prefix cache should have, for which prompts share a beginning.
    Raises TuningError."""
    if hit_rate:
        load = _with_prefixes(load, num_requests, base, hit_rate)
    shape = read_shape(base.model)
    return TuneWorkload(
        dataset=choose(load, tokenizer=base.tokenizer or base.model),
        num_requests=num_requests,
        vocab_size=shape.vocab_size,
        max_model_len=min(base.max_model_len or shape.max_model_len, shape.max_model_len),
        seed=load.seed,
        burstiness=load.burstiness,
    )


def _with_prefixes(load: LoadFlags, num_requests: int, base: Options, hit_rate: float) -> LoadFlags:
    if load.dataset is not DatasetKind.RANDOM:
        raise TuningError(
            f"--min-prefix-hit-rate={hit_rate:g} makes prompts with a common beginning: give it without --dataset"
        )
    text = load.prompt_len or DEFAULT_LEN
    if not text.isdecimal():
        raise TuningError(f"--min-prefix-hit-rate needs prompts of one length, not --prompt-len={text}")
    length = int(text)
    # Whole blocks are found, by all requests but the first, also of the smallest part of the load.
    count = max(2, round(LEAST_SHARE * num_requests))
    share = math.ceil(hit_rate * length * count / (count - 1) / base.block_size) * base.block_size
    if share >= length:
        raise TuningError(
            f"--min-prefix-hit-rate={hit_rate:g}: a common beginning of {share} tokens leaves none of a prompt of "
            f"{length}; give a lower rate, or longer prompts"
        )
    return replace(load, dataset=DatasetKind.PREFIXES, prefix_len=share)


def _open_journal(
    query: TuneFlags | SweepFlags, load: LoadFlags, base: Options, common: Mapping[str, object]
) -> Journal:
    path: Path = query.output / _STATE
    if query.restart:
        path.unlink(missing_ok=True)
    return Journal(
        path,
        {
            "version": octavo_version(),
            "options": {name: str(value) for name, value in base.as_file().items() if name not in OWN},
            "load": {name: str(value) for name, value in asdict(load).items()},
            "num_requests": query.num_requests,
            **common,
        },
        advice="give the same flags to go on, another --output, or --restart to begin anew",
    )


def _memory(
    base: Options, settings: list[Setting], clusters: LocalClusters, workload: TuneWorkload
) -> MemoryRange | None:
    """None: the memory is given."""
    if base.model_fields_set.intersection(_MEMORY_OPTIONS):
        return None
    largest = max(settings, key=lambda each: dict(each.values).get("max_num_seqs", 0))
    options = clusters.options(largest, {})
    return memory_values(Machine(options=options), max_num_seqs=options.max_num_seqs, longest=workload.longest)


def _report(
    query: TuneFlags,
    given: GivenOptions,
    found: Found,
    journal: Journal,
    watcher: Progress,
    workload: TuneWorkload,
    command: str,
) -> Report:
    options: dict[str, Any] = {}
    profiled = "no setting keeps the bounds"
    base = given.options()
    if found.best is not None:
        set_by_user = {name: value for name, value in base.as_file().items() if name in base.model_fields_set}
        options = {**set_by_user, **found.best.setting.options, **found.memory}
        if dict(found.best.setting.values).get("speculative_config") == OFF:
            options.pop("speculative_config", None)
        profiled = _profile(query, found.best.measured, options, watcher, workload)
    requests = workload.requests(math.inf)
    prompt_len, output_len = (
        sum(getattr(each, name) for each in requests) / len(requests) for name in ("prompt_len", "output_len")
    )
    return Report(
        found=found,
        bounds=query.bounds,
        title=f"{base.model}, {len(requests)} requests of {workload.dataset.name}, "
        f"{prompt_len:.0f} in, {output_len:.0f} out",
        options=options,
        seconds=sum(result.get("seconds", 0.0) for result in journal.results.values()),
        profile=profiled,
        command=command,
    )


def _profile(
    query: TuneFlags,
    measured: Mapping[str, Any],
    options: Mapping[str, Any],
    watcher: Progress,
    workload: TuneWorkload,
) -> str:
    """Records the winner's steps. Returns the file, or why there is none."""
    if not query.profile:
        return "not recorded (--no-profile)"
    resolved = load_options(None, dict(options), {})
    if resolved.world_size > 1:
        return "not recorded: the profiled engine runs in one process, and this setting has several ranks"
    watcher.expect(1)
    watcher.begin("profile of the best setting")
    file = query.output / "profiled.yaml"
    file.write_text(yaml.safe_dump(dict(options)), encoding="utf-8")
    requests = workload.requests(math.inf)
    # As many rows as ran at once, about: as throughput times latency says.
    batch = round(measured["requests_s"] * measured["e2e_ms_p50"] / 1e3)
    reason = profile(
        file,
        query.output / _PROFILE,
        batch=min(max(batch, 1), resolved.max_num_seqs),
        prompt_len=round(sum(each.prompt_len for each in requests) / len(requests)),
    )
    file.unlink()
    return f"failed: {reason}" if reason else str(query.output / _PROFILE)
