"""The steps of `octavo tune`, from the flags to the report."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from configs.load import load_options
from configs.options import Options
from octavo.bench.datasets.chosen import DEFAULT_LEN, DatasetKind, DatasetQuery, choose
from octavo.doctor.machine import Machine
from octavo.plan.costs.model_shape import read_shape
from octavo.reports import print_json
from octavo.tune.bounds import Bounds
from octavo.tune.errors import TuningError
from octavo.tune.progress import Progress
from octavo.tune.report.page import PAGE, Report
from octavo.tune.report.profiling import profile
from octavo.tune.search.results import Found
from octavo.tune.search.tuner import LEAST_SHARE, Effort, MemoryRange, Tuner
from octavo.tune.space import OFF, Candidate, default_axes, grid, parse_values
from octavo.tune.trials.clusters import LocalClusters
from octavo.tune.trials.journal import Journal
from octavo.tune.trials.memory import memory_values
from octavo.tune.workload import TuneWorkload
from runtime.model_files import resolve_model
from runtime.wire import octavo_version

_STATE, _TRACES, _LOGS, _PROFILE = "state.jsonl", "traces", "logs", "profile.json.gz"
_MEMORY_OPTIONS = ("kv_cache_memory", "gpu_memory_utilization", "num_blocks_override")


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """The flags as given; those of axes are text, empty if not given."""

    config: Path | None
    option_flags: Mapping[str, object]
    axes: Mapping[str, str]
    dataset: DatasetQuery
    # Share of each prompt that others have, too; 0: none.
    min_prefix_hit_rate: float
    num_requests: int
    burstiness: float
    seed: int
    bounds: Bounds
    effort: Effort
    output: Path
    restarts: bool
    profiles: bool
    command: str


def tune(query: Query, *, as_json: bool) -> bool:
    """Tunes, and writes the report into the output folder. Returns False if no setting keeps the bounds.

    Raises ConfigError, ModelNotFoundError, and KeyboardInterrupt: the same command then goes on where it stopped.
    """
    base = load_options(query.config, dict(query.option_flags))
    resolve_model(base.model)
    axes = {name: parse_values(text, name) for name, text in query.axes.items() if text}
    candidates = grid({**default_axes(base), **axes})
    workload = workload_of(query, base)
    clusters = LocalClusters(query.config, query.option_flags, query.output / _LOGS)
    if query.restarts:
        (query.output / _STATE).unlink(missing_ok=True)
    journal = Journal(query.output / _STATE, _common(query, candidates, base))
    with Progress(hidden=as_json) as watcher:
        if journal.num_kept:
            watcher.say(f"going on with {journal.num_kept} results of {journal.path}")
        tuner = Tuner(
            candidates,
            workload,
            query.bounds,
            query.effort,
            clusters=clusters,
            options_of=clusters.options,
            journal=journal,
            traces=query.output / _TRACES,
            watcher=watcher,
        )
        try:
            found = tuner.run(_memory(query, candidates, clusters, workload))
            report = _report(query, found, journal, watcher, workload)
        finally:
            journal.close()
    report.write(query.output)
    if as_json:
        print_json(report.as_json())
    else:
        console = Console()
        report.print(console)
        if report.options:
            console.print(report.yaml(), highlight=False, markup=False, soft_wrap=True, style="green")
        console.print(f"{query.output / PAGE}", highlight=False, soft_wrap=True)
    return found.best is not None


def workload_of(query: Query, base: Options) -> TuneWorkload:
    dataset = query.dataset
    if dataset.kind is DatasetKind.SHAREGPT:
        dataset = replace(dataset, tokenizer=base.tokenizer or base.model)
    if query.min_prefix_hit_rate:
        if dataset.kind is not DatasetKind.RANDOM:
            raise TuningError(
                f"--min-prefix-hit-rate={query.min_prefix_hit_rate:g} makes prompts with a common beginning: give it "
                "without --dataset"
            )
        if not (dataset.prompt_len or DEFAULT_LEN).isdecimal():
            raise TuningError(
                f"--min-prefix-hit-rate needs prompts of one length, not --prompt-len={dataset.prompt_len}"
            )
        length = int(dataset.prompt_len or DEFAULT_LEN)
        # Whole blocks are found, by all requests but the first, also of the smallest part of the load.
        count = max(2, round(LEAST_SHARE * query.num_requests))
        needed = query.min_prefix_hit_rate * length * count / (count - 1)
        share = math.ceil(needed / base.block_size) * base.block_size
        if share >= length:
            raise TuningError(
                f"--min-prefix-hit-rate={query.min_prefix_hit_rate:g}: a common beginning of {share} tokens leaves "
                f"none of a prompt of {length}; give a lower rate, or longer prompts"
            )
        dataset = replace(dataset, kind=DatasetKind.PREFIXES, prefix_len=share)
    shape = read_shape(base.model)
    return TuneWorkload(
        dataset=choose(dataset),
        num_requests=query.num_requests,
        vocab_size=shape.vocab_size,
        max_model_len=min(base.max_model_len or shape.max_model_len, shape.max_model_len),
        seed=query.seed,
        burstiness=query.burstiness,
    )


def _common(query: Query, candidates: list[Candidate], base: Options) -> dict[str, Any]:
    """The facts that all results of a run share."""
    return {
        "version": octavo_version(),
        "options": {
            name: str(value)
            for name, value in base.as_file().items()
            # Each cluster has its own.
            if name not in ("runtime_dir", "port", "http_port", "metrics_port")
        },
        "settings": [candidate.key for candidate in candidates],
        "dataset": {name: str(getattr(query.dataset, name)) for name in query.dataset.__dataclass_fields__},
        "min_prefix_hit_rate": query.min_prefix_hit_rate,
        "num_requests": query.num_requests,
        "burstiness": query.burstiness,
        "seed": query.seed,
        "bounds": query.bounds.as_json(),
        "exhaustive": query.effort.is_exhaustive,
    }


def _memory(
    query: Query, candidates: list[Candidate], clusters: LocalClusters, workload: TuneWorkload
) -> MemoryRange | None:
    """None: the memory is given."""
    if load_options(query.config, dict(query.option_flags)).model_fields_set.intersection(_MEMORY_OPTIONS):
        return None
    rows = [candidate for candidate in candidates if "max_num_seqs" in dict(candidate.values)]
    largest = max(rows, key=lambda each: each.value("max_num_seqs")) if rows else candidates[0]
    options = clusters.options(largest, {})
    option, values, why = memory_values(
        Machine(options=options), max_num_seqs=options.max_num_seqs, longest=workload.longest
    )
    return MemoryRange(option=option, values=values, why=why)


def _report(query: Query, found: Found, journal: Journal, watcher: Progress, workload: TuneWorkload) -> Report:
    options: dict[str, Any] = {}
    told = "no setting keeps the bounds"
    if found.best is not None:
        base = load_options(query.config, dict(query.option_flags))
        given = {name: value for name, value in base.as_file().items() if name in base.model_fields_set}
        options = {**given, **found.best.candidate.options, **found.memory}
        if dict(found.best.candidate.values).get("speculative_config") == OFF:
            options.pop("speculative_config", None)
        told = _profile(query, found, options, watcher, workload)
    requests = workload.requests(math.inf)
    lengths = f"{_mean([r.prompt_len for r in requests])} in, {_mean([r.output_len for r in requests])} out"
    model = load_options(query.config, dict(query.option_flags)).model
    return Report(
        found=found,
        bounds=query.bounds,
        title=f"{model}, {len(requests)} requests of {workload.dataset.name}, {lengths}",
        options=options,
        seconds=sum(result.get("seconds", 0.0) for result in journal.results.values()),
        profile=told,
        command=query.command,
    )


def _mean(numbers: list[int]) -> str:
    return f"{sum(numbers) / len(numbers):.0f}"


def _profile(query: Query, found: Found, options: Mapping[str, Any], watcher: Progress, workload: TuneWorkload) -> str:
    """Records the winner's steps. Returns the file, or why there is none."""
    if not query.profiles:
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
    assert found.best is not None
    measured = found.best.measured
    batch = round(measured["requests_s"] * measured["e2e_ms_p50"] / 1e3)
    reason = profile(
        file,
        query.output / _PROFILE,
        batch=min(max(batch, 1), resolved.max_num_seqs),
        prompt_len=round(sum(each.prompt_len for each in requests) / len(requests)),
    )
    file.unlink()
    return f"failed: {reason}" if reason else str(query.output / _PROFILE)
