"""`octavo keys`."""

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer, group: str) -> None:
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
