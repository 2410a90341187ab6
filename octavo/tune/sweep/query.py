"""The steps of `octavo bench sweep`, from the flags to the table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from configs.load import load_options
from octavo.bench.datasets.chosen import DatasetQuery, choose
from octavo.plan.costs.model_shape import read_shape
from octavo.reports import print_json
from octavo.tune.bounds import Bounds
from octavo.tune.errors import TuningError
from octavo.tune.progress import Progress
from octavo.tune.space import parse_assignments, product
from octavo.tune.sweep.table import PLOT, TABLE, SweepRow, draw, sweep, write_table
from octavo.tune.trials.clusters import LocalClusters
from octavo.tune.trials.journal import Journal
from octavo.tune.trials.trials import Trials
from octavo.tune.workload import TuneWorkload
from runtime.model_files import resolve_model
from runtime.wire import octavo_version

_STATE, _LOGS = "state.jsonl", "logs"
_SHOWN = ("output_tok_s", "ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99", "e2e_ms_p99")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepQuery:
    """The flags as given. assignments: NAME=V,V,..."""

    config: Path | None
    option_flags: Mapping[str, object]
    assignments: Sequence[str]
    rates: Sequence[float]
    num_runs: int
    dataset: DatasetQuery
    num_requests: int
    burstiness: float
    seed: int
    output: Path
    restarts: bool


def run_sweep(query: SweepQuery, *, as_json: bool) -> bool:
    """Measures, and writes table and plot into the output folder. Returns False if a setting failed.

    Raises ConfigError, ModelNotFoundError, and KeyboardInterrupt: the same command then goes on where it stopped.
    """
    base = load_options(query.config, dict(query.option_flags))
    resolve_model(base.model)
    candidates = product(parse_assignments(query.assignments, "--set"))
    clusters = LocalClusters(query.config, query.option_flags, query.output / _LOGS)
    for candidate in candidates:
        # Values that can't be are an error now, not hours later.
        clusters.options(candidate, {})
    shape = read_shape(base.model)
    workload = TuneWorkload(
        dataset=choose(query.dataset),
        num_requests=query.num_requests,
        vocab_size=shape.vocab_size,
        max_model_len=min(base.max_model_len or shape.max_model_len, shape.max_model_len),
        seed=query.seed,
        burstiness=query.burstiness,
    )
    if query.restarts:
        (query.output / _STATE).unlink(missing_ok=True)
    journal = Journal(query.output / _STATE, _common(query))
    try:
        with Progress(hidden=as_json) as progress:
            trials = Trials(clusters, journal, workload, Bounds())
            rows = sweep(candidates, query.rates, query.num_runs, trials, progress)
    finally:
        journal.close()
    write_table(query.output / TABLE, rows)
    if any(row.numbers for row in rows):
        draw(query.output / PLOT, rows, title=f"{base.model}, {len(workload.requests(1.0))} requests")
    elif not as_json:
        raise TuningError(f"no setting works; the first: {rows[0].error}")
    if as_json:
        for row in rows:
            print_json(row.as_json())
    else:
        _print(rows, query.output)
    return not any(row.error for row in rows)


def _common(query: SweepQuery) -> dict[str, object]:
    base = load_options(query.config, dict(query.option_flags))
    return {
        "version": octavo_version(),
        "options": {name: str(value) for name, value in base.as_file().items() if name in base.model_fields_set},
        "dataset": {name: str(getattr(query.dataset, name)) for name in query.dataset.__dataclass_fields__},
        "num_requests": query.num_requests,
        "burstiness": query.burstiness,
        "seed": query.seed,
    }


def _print(rows: Sequence[SweepRow], output: Path) -> None:
    console = Console()
    table = Table(*("setting", "rate", "run", *_SHOWN))
    for row in rows:
        cells = [f"{row.numbers[name]:,.4g}" if row.numbers else "-" for name in _SHOWN]
        table.add_row(row.candidate.label, f"{row.rate:g}", str(row.run + 1), *cells)
    console.print(table)
    console.print(f"{output / TABLE}, {output / PLOT}", highlight=False, soft_wrap=True)
