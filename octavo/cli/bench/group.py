"""The group of commands `octavo bench`."""

import typer

from configs.options import Options
from octavo.cli.bench import engine, kernels, serve, sweep
from octavo.cli.bench.load_flags import with_load_flags
from octavo.cli.flags import SNAKE_CASE_FLAGS, with_option_flags


def register(app: typer.Typer, group: str) -> None:
    bench = typer.Typer(no_args_is_help=True, help="Measure a running cluster or the engine alone; tune GPU kernels.")
    bench.command()(with_load_flags(serve.serve))
    for command in (engine.throughput, engine.latency):
        bench.command(context_settings=SNAKE_CASE_FLAGS)(with_option_flags(command))
    # Each cluster has a port and a runtime directory of its own.
    shared = [name for name in Options.model_fields if name not in ("port", "runtime_dir", "http_port", "metrics_port")]
    bench.command(context_settings=SNAKE_CASE_FLAGS)(with_option_flags(with_load_flags(sweep.sweep), shared))
    bench.command()(kernels.kernels)
    app.add_typer(bench, name="bench", rich_help_panel=group)
