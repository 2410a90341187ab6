"""Commands for this machine: doctor, keys, pull and version."""

import platform
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli.flags import CONFIG_FLAG, SNAKE_CASE_FLAGS, options_from_flags, with_option_flags


def register_doctor(app: typer.Typer, group: str) -> None:
    app.command(name="doctor", rich_help_panel=group, context_settings=SNAKE_CASE_FLAGS)(with_option_flags(doctor))


def doctor(
    config: CONFIG_FLAG = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object per line, for programs: subject, state, found, advice."),
    ] = False,
    **flags: Any,
) -> None:
    """Check this machine, and say what to change.

    Takes the options of `octavo up`, and checks what a cluster with them needs: CPU, compiler, huge pages, cores, GPU,
    driver, versions, ports, caches, disk space, memory for the model, clock and limits. Each line is ok, a note (a
    cluster runs, but could run better) or a problem (it does not start, fails later, or is several times slower than
    it should be), with what to do. Exits with 1 if there is a problem.

    Example: [bold]octavo doctor -c configs/local.yaml --model ./my-model[/]
    """
    # Imported here: `octavo --help` does not need them.
    from rich.console import Console

    from octavo.doctor.examine import examine, print_lines, print_page
    from octavo.doctor.machine import Machine, State

    checks = examine(Machine(options=options_from_flags(config, flags)))
    found = print_lines(checks) if as_json else print_page(checks, Console())
    raise typer.Exit(any(check.state is State.PROBLEM for check in found))


def register_keys(app: typer.Typer, group: str) -> None:
    app.command(rich_help_panel=group)(keys)


def keys(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="The directory for the keys; it must not hold any yet.")
    ],
) -> None:
    """Make the keys that encrypt traffic between schedulers and workers.

    These are CURVE keys, for the option curve_dir. Schedulers and workers that talk over tcp need them.
    """
    from runtime.security.curve import CurveError, make_keys

    try:
        make_keys(directory)
    except CurveError as error:
        raise typer.BadParameter(str(error)) from None
    typer.echo(
        f"Keys are in {directory}. Start schedulers and workers with --curve-dir {directory}; a worker's machine "
        f"needs only worker.key_secret and scheduler.key."
    )


def register_pull(app: typer.Typer, group: str) -> None:
    app.command(rich_help_panel=group)(pull)


def pull(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="ORG/NAME, or ORG/NAME:CHOICE for one GGUF file of several: a quantization or a file's name.",
        ),
    ],
) -> None:
    """Download a model from the Hugging Face hub.

    `octavo up --model MODEL` then starts without a download. Only safetensors, GGUF, config and tokenizer files are
    downloaded, into the hub's usual cache; never code or pickles. Checksums are verified. An interrupted download
    continues where it stopped when you run the command again. Prints the path of the model's directory or file.

    Environment: HF_TOKEN (gated and private models), HF_HOME (the cache), HF_ENDPOINT (a mirror), HF_HUB_OFFLINE=1
    (use the cache only).

    Example: [bold]octavo pull ORG/NAME:Q4_K_M[/]
    """
    from rich.console import Console

    from octavo.downloads import shown_download
    from runtime.hub.progress import bytes_text
    from runtime.hub.pull import pull as pull_model

    # stdout gets only the path.
    console = Console(stderr=True)
    with shown_download(console) as progress:
        pulled = pull_model(model, progress)
    if pulled.warning:
        console.print(f"{pulled.warning}; using an earlier download", highlight=False, soft_wrap=True)
    files = "1 file" if pulled.num_files == 1 else f"{pulled.num_files} files"
    console.print(f"{pulled.repo} at {pulled.commit[:12]}: {files}, {bytes_text(pulled.num_bytes)}", highlight=False)
    typer.echo(pulled.path)


def register_version(app: typer.Typer, group: str) -> None:
    app.command(rich_help_panel=group)(version)


def version() -> None:
    """Show the versions of Octavo and the packages it builds on."""
    names = ("octavo", "torch", "transformers", "tokenizers", "grpcio", "protobuf", "pyzmq")
    for name, found in [("python", platform.python_version()), *((name, metadata.version(name)) for name in names)]:
        typer.echo(f"{name:<14}{found}")
