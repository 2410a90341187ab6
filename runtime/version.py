"""Which Octavo this is, for fingerprints and for the wires' first messages."""

from functools import cache
from importlib.metadata import version


@cache
def octavo_version() -> str:
    """The installed version, such as "0.1.0"."""
    return version("octavo")
