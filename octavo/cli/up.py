"""`octavo up`."""

import os
import sys
from typing import IO, Annotated, Any, Literal, cast

import typer

from configs.options import Options
from octavo.cli.flags import CONFIG_FLAG, SNAKE_CASE_FLAGS, options_from_flags, with_option_flags
from octavo.cluster.errors import ClusterError, ProcessFailed


def register(app: typer.Typer, group: str) -> None:
    app.command(name="up", rich_help_panel=group, context_settings=SNAKE_CASE_FLAGS)(with_option_flags(up))


def up(
    config: CONFIG_FLAG = None,
    first_prompt: Annotated[
        str, typer.Option(metavar="TEXT", help="Once the cluster is ready, answer this chat message, token by token.")
    ] = "",
    on: Annotated[
        Literal["here", "ray"],
        typer.Option(
            help="Where it runs: on this machine, or on the nodes of a Ray cluster (RAY_ADDRESS, or this machine's)."
        ),
    ] = "here",
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Show every log line of the processes while they load.")
    ] = False,
    **flags: Any,
) -> None:
    """Start a cluster that serves a model, and keep it running.

    A cluster is a router (or num_routers), and a scheduler with its workers for each replica. A process that dies is
    restarted. Ctrl-C lets running requests finish, then stops the cluster; a second Ctrl-C stops it at once.

    Every option can also be set in a YAML file (-c) or in the environment (OCTAVO_MAX_NUM_SEQS=64). Flags win over
    the environment, and the environment wins over the file.

    Example: [bold]octavo up -c configs/local.yaml --data-parallel-size 1 --max-num-seqs 128[/]
    """
    # Imported here: `octavo --help` does not need them.
    from rich.console import Console

    from octavo.cluster.display import Output
    from octavo.cluster.launcher import run_cluster
    from octavo.downloads import shown_download
    from runtime.model_files import resolve_model

    options = options_from_flags(config, flags)
    output = Output()
    console = Console(file=cast(IO[str], output))
    # Before any process starts: a missing model is one clear error, and a download happens once.
    with shown_download(console) as progress:
        resolve_model(options.model, progress)
    start = run_cluster
    if options.distributed_executor_backend == "ray":
        on = "ray"
    if on == "here":
        # The processes use this download: they send no requests to the hub, and all of them load the same version.
        os.environ["HF_HUB_OFFLINE"] = "1"
    else:
        from octavo.ray.launcher import run_cluster_on_ray

        start = run_cluster_on_ray
    try:
        code = start(options, console=console, first_prompt=first_prompt, verbose=verbose)
    except ClusterError as error:
        output.drain()
        # At once: looking for the cause takes seconds.
        print(f"octavo: {error}", file=sys.stderr, flush=True)
        # The nodes of a Ray cluster are other machines than this one.
        if on == "here":
            print(_what_doctor_says(error, options), file=sys.stderr)
        code = 1
    raise typer.Exit(code)


def _what_doctor_says(error: ClusterError, options: Options) -> str:
    """Names `octavo doctor`; for a process that failed, with the problems that it finds on this machine."""
    if not isinstance(error, ProcessFailed):
        return "`octavo doctor` with the same options checks this machine."
    from octavo.doctor.examine import problems

    found = [f"\n  {check.subject}: {check.found}\n    to do: {check.advice}" for check in problems(options)]
    return f"`octavo doctor` finds on this machine:{''.join(found) or ' no problem'}"
