"""`octavo keys`."""

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command()(keys)


def keys(directory: Annotated[Path, typer.Argument(metavar="DIR", help="A directory that holds no keys yet.")]) -> None:
    """Make the CURVE keys that schedulers and workers need to talk over tcp (option curve_dir)."""
    from runtime.security.curve import CurveError, make_keys

    try:
        make_keys(directory)
    except CurveError as error:
        raise typer.BadParameter(str(error)) from None
    typer.echo(
        f"Keys are in {directory}. Start schedulers and workers with --curve-dir {directory}; a worker's machine needs "
        f"worker.key_secret and scheduler.key only."
    )
