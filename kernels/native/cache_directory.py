"""The directory for what is made once per machine: compiled kernels, packed weights, tuned configurations."""

import os
from pathlib import Path


class CacheDirectoryError(OSError):
    """The directory cannot be used; the message says why, and what would help."""


def cache_directory(name: str) -> Path:
    """Returns the directory, and creates it if needed. Only this user may write to it: its contents run in every
    worker.

    It is $OCTAVO_CACHE_DIR/name, or octavo/name in $XDG_CACHE_HOME or ~/.cache. Raises CacheDirectoryError.
    """
    own, shared = os.environ.get("OCTAVO_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    home = Path(own).expanduser() if own else Path(shared or Path.home() / ".cache") / "octavo"
    directory = home / name
    try:
        directory.mkdir(parents=True, mode=0o700, exist_ok=True)
        status = directory.stat()
        if status.st_uid == os.getuid() and status.st_mode & 0o077:
            directory.chmod(0o700)
    except OSError as error:
        raise CacheDirectoryError(
            f"{directory} cannot be used ({error}): set OCTAVO_CACHE_DIR to a directory of yours"
        ) from None
    if status.st_uid != os.getuid():
        raise CacheDirectoryError(f"{directory} belongs to another user: set OCTAVO_CACHE_DIR to a directory of yours")
    return directory
