"""What the commands that talk to a running cluster have in common."""

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, TypedDict

import typer

from octavo.errors import Unavailable

if TYPE_CHECKING:
    import grpc

TARGET = Annotated[str, typer.Option(metavar="HOST:PORT", help="A router, or one scheduler.")]
_PANEL = "Connection"
TLS = Annotated[bool, typer.Option("--tls", help="Speak TLS, and trust the usual CAs.", rich_help_panel=_PANEL)]
TLS_CA = Annotated[
    str | None, typer.Option(metavar="FILE", help="Speak TLS, and trust these CAs (PEM).", rich_help_panel=_PANEL)
]
TLS_CERT = Annotated[
    str | None, typer.Option(metavar="FILE", help="A certificate of yours, if asked for one.", rich_help_panel=_PANEL)
]
TLS_KEY = Annotated[str | None, typer.Option(metavar="FILE", help="The certificate's key.", rich_help_panel=_PANEL)]
# From the environment alone: everybody on a machine sees the flags of its processes.
_API_KEY = "OCTAVO_API_KEY"


class Connection(TypedDict):
    """The arguments that all clients have."""

    api_key: str
    credentials: "grpc.ChannelCredentials | None"


def connection(tls: bool, ca_file: str | None, cert_file: str | None, key_file: str | None) -> Connection:
    """As flags and the environment say. Raises typer.BadParameter."""
    credentials = None
    if tls or ca_file or cert_file or key_file:
        from octavo.connection import tls_credentials  # imports gRPC, which `--help` needs not wait for

        try:
            credentials = tls_credentials(ca_file, cert_file, key_file)
        except (OSError, ValueError) as error:
            raise typer.BadParameter(f"--tls-ca, --tls-cert, --tls-key: {error}") from None
    return Connection(api_key=os.environ.get(_API_KEY, ""), credentials=credentials)


def separate(targets: Iterable[str]) -> list[str]:
    """Of a flag that may be given several times, or name several, comma-separated. Raises typer.BadParameter."""
    found = [part.strip() for target in targets for part in target.split(",") if part.strip()]
    if not found:
        raise typer.BadParameter("--target is empty: give HOST:PORT of a router")
    return found


@contextlib.contextmanager
def reaching(*targets: str) -> Iterator[None]:
    """Says in Unavailable what to do about it."""
    try:
        yield
    except Unavailable as error:
        raise Unavailable(
            f"no cluster is ready at {' or '.join(targets)} ({error}): start one with `octavo up`, or name another "
            f"with --target"
        ) from None


def note_unreachable(replicas: Iterable[str]) -> None:
    """On stderr: the answer is not that of all replicas."""
    for replica in replicas:
        print(f"octavo: not reached: {replica}", file=sys.stderr)
