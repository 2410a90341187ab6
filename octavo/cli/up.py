"""`octavo up`."""

from typing import Annotated, Any, Literal

import typer

from octavo.cli.flags import CONFIG_FLAG, SNAKE_CASE_FLAGS, options_from_flags, with_option_flags


def register(app: typer.Typer) -> None:
    app.command(name="up", context_settings=SNAKE_CASE_FLAGS)(with_option_flags(up))


def up(
    config: CONFIG_FLAG = None,
    first_prompt: Annotated[
        str, typer.Option(metavar="TEXT", help="Answer this chat message once the cluster is ready, token by token.")
    ] = "",
    on: Annotated[
        Literal["here", "ray"],
        typer.Option(help="Where: on this machine, or on the nodes of a Ray cluster (RAY_ADDRESS, or this machine's)."),
    ] = "here",
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Show every line of the processes while they load.")
    ] = False,
    **flags: Any,
) -> None:
    """Start a cluster: a router (or num_routers), and a scheduler with its workers for each replica.

    It runs until Ctrl-C, which lets running requests finish; a second Ctrl-C ends them. A process that dies is started
    again.

    Every option can also be given in a YAML file (-c) or in the environment (OCTAVO_MAX_NUM_SEQS=64). A flag wins over
    the environment, and that over the file.

    Example: [bold]octavo up -c configs/local.yaml --data-parallel-size 1 --max-num-seqs 128[/]
    """
    # Here, not above: `octavo --help` needs none of it.
    from rich.console import Console

    from octavo.cluster.launcher import run_cluster
    from runtime.model_files import resolve_model

    options = options_from_flags(config, flags)
    # Once, before any process asks: a model that is not here is one clear error, and a download happens once.
    resolve_model(options.model)
    start = run_cluster
    if on == "ray":
        from octavo.ray.launcher import run_cluster_on_ray

        start = run_cluster_on_ray
    raise typer.Exit(start(options, console=Console(), first_prompt=first_prompt, verbose=verbose))
