"""What the commands that talk to a running cluster have in common."""

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Annotated

import typer

from octavo.errors import Unavailable

TARGET = Annotated[str, typer.Option(metavar="HOST:PORT", help="A router, or one scheduler.")]


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
