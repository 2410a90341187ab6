"""`octavo pull`."""

from typing import Annotated

import typer


def register(app: typer.Typer, group: str) -> None:
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
