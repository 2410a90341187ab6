"""`octavo tune` and `octavo bench sweep`."""

import shlex
import sys
from typing import Any

import typer

from configs.options import Options
from octavo.cli.flags import (
    CONFIG_FLAG,
    SNAKE_CASE_FLAGS,
    given_options,
    parse_rates,
    plan_packages,
    resumable,
    with_option_flags,
)
from octavo.lab.flags import LoadFlags, with_flags
from octavo.lab.settings import AXES
from octavo.tune.flags import OWN, SweepFlags, TuneFlags

_NOTHING_WITHIN_BOUNDS = 1
_SWEEP_OPTIONS = [name for name in Options.model_fields if name not in OWN or name == "trace"]
_TUNE_OPTIONS = [name for name in Options.model_fields if name not in (*AXES, *OWN)]


def register(app: typer.Typer, group: str) -> None:
    app.command(name="tune", rich_help_panel=group, context_settings=SNAKE_CASE_FLAGS)(
        with_option_flags(with_flags(tune), _TUNE_OPTIONS)
    )


def register_sweep(bench: typer.Typer) -> None:
    bench.command(context_settings=SNAKE_CASE_FLAGS)(with_option_flags(with_flags(sweep), _SWEEP_OPTIONS))


def tune(*, config: CONFIG_FLAG = None, query: TuneFlags, load: LoadFlags, **flags: Any) -> None:
    """Find the options with the most throughput within a latency bound.

    Starts clusters on this machine. First the most memory that works; then a few probes, from whose recorded steps all
    settings are predicted by the scheduler's own core; then the settings that can still win are measured, each at the
    highest request rate that keeps the bounds; the best two in turns. Ctrl-C ends it at any time: the same command goes
    on where it stopped. The report, a page with plots and the YAML to use are in --output. Options of the cluster are
    flags as for `octavo up`.

    Example: [bold]octavo tune -c configs/local.yaml --prompt-len 512 --output-len 128 --max-itl-ms 200[/]

    Example: [bold]octavo tune --max-num-seqs 16,64 --worker-threads 1,2 --speculation off,suffix --max-e2e-ms 5000[/]
    """
    with plan_packages("octavo tune"):
        from octavo.tune.query import run_tune

    command = shlex.join(["octavo", *sys.argv[1:]])
    with resumable(query.output):
        keeps_bounds = run_tune(query, load, given_options(config, flags), command=command)
    if not keeps_bounds:
        typer.echo("no setting keeps the bounds; the report says how far off they are", err=True)
        raise typer.Exit(_NOTHING_WITHIN_BOUNDS)


def sweep(*, config: CONFIG_FLAG = None, query: SweepFlags, load: LoadFlags, **flags: Any) -> None:
    """Measure clusters with different settings, into CSV and a plot.

    Starts a cluster on this machine for each combination of values, and measures it at each rate. A setting that fails
    is a line with its reason; the exit code is then 1. Ctrl-C ends it at any time: the same command goes on where it
    stopped. Options that all settings share are flags as for `octavo up`.

    Example: [bold]octavo bench sweep --set max_num_seqs=16,64 --set worker_threads=1,2 --request-rate 2,4,inf[/]
    """
    with plan_packages("octavo bench sweep"):
        from octavo.tune.query import run_sweep

    if not query.assignments:
        raise typer.BadParameter("is needed, such as max_num_seqs=16,64", param_hint="--set")
    with resumable(query.output):
        worked = run_sweep(query, load, given_options(config, flags), parse_rates(query.request_rate))
    if not worked:
        raise typer.Exit(1)
