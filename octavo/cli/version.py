"""`octavo version`."""

import platform
from importlib import metadata

import typer


def register(app: typer.Typer, group: str) -> None:
    app.command(rich_help_panel=group)(version)


def version() -> None:
    """Show the versions of Octavo and the packages it builds on."""
    names = ("octavo", "torch", "transformers", "tokenizers", "grpcio", "protobuf", "pyzmq")
    for name, found in [("python", platform.python_version()), *((name, metadata.version(name)) for name in names)]:
        typer.echo(f"{name:<14}{found}")
