"""The group of commands `octavo bench`."""

import typer

from octavo.cli.bench import engine, kernels, serve
from octavo.cli.flags import SNAKE_CASE_FLAGS, with_option_flags


def register(app: typer.Typer, group: str) -> None:
    bench = typer.Typer(no_args_is_help=True, help="Measure a running cluster or the engine alone; tune GPU kernels.")
    bench.command()(serve.serve)
    for command in (engine.throughput, engine.latency):
        bench.command(context_settings=SNAKE_CASE_FLAGS)(with_option_flags(command))
    bench.command()(kernels.kernels)
    app.add_typer(bench, name="bench", rich_help_panel=group)
