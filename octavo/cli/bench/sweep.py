"""`octavo bench sweep`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from configs.load import ConfigError
from octavo.cli.bench.flags import JSON
from octavo.cli.bench.load_flags import LoadFlags
from octavo.cli.bench.serve import parse_rates
from octavo.cli.flags import CONFIG_FLAG


def sweep(
    load: LoadFlags,
    config: CONFIG_FLAG = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=V,V,...",
            help="An option of `octavo up` and its values. Several: every combination is measured.",
        ),
    ] = None,
    request_rate: Annotated[
        str, typer.Option(metavar="R|inf,...", help="Requests per second; each is measured with every setting.")
    ] = "inf",
    num_runs: Annotated[int, typer.Option(min=1, help="How often all is measured, settings in turn.")] = 1,
    num_requests: Annotated[int, typer.Option(min=1, help="Requests of a measurement.")] = 64,
    output: Annotated[Path, typer.Option(metavar="DIR", help="Where sweep.csv, sweep.png, state and logs go.")] = Path(
        "octavo-sweep"
    ),
    restart: Annotated[bool, typer.Option("--restart", help="Forget what an earlier run has measured.")] = False,
    as_json: JSON = False,
    **flags: Any,
) -> None:
    """Measure clusters with different settings, into CSV and a plot.

    Starts a cluster on this machine for each combination of values, and measures it at each rate. A setting that fails
    is a line with its reason; the exit code is then 1. Ctrl-C ends it at any time: the same command goes on where it
    stopped. Options that all settings share are flags as for `octavo up`.

    Example: [bold]octavo bench sweep --set max_num_seqs=16,64 --set worker_threads=1,2 --request-rate 2,4,inf[/]
    """
    try:
        from octavo.tune.sweep.query import SweepQuery, run_sweep
    except ModuleNotFoundError as error:
        raise ConfigError(f"octavo bench sweep needs the package {error.name}: pip install 'octavo[plan]'") from None

    if not assignments:
        raise typer.BadParameter("is needed, such as max_num_seqs=16,64", param_hint="--set")
    query = SweepQuery(
        config=config,
        option_flags={name: value for name, value in flags.items() if value is not None},
        assignments=assignments,
        rates=parse_rates(request_rate),
        num_runs=num_runs,
        dataset=load.query(),
        num_requests=num_requests,
        burstiness=load.burstiness,
        seed=load.seed,
        output=output,
        restarts=restart,
    )
    try:
        worked = run_sweep(query, as_json=as_json)
    except KeyboardInterrupt:
        typer.echo(f"what was measured is kept in {output}; the same command goes on from there", err=True)
        raise
    if not worked:
        raise typer.Exit(1)
