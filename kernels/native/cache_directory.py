"""Where what is made once for this machine is kept: compiled kernels, packed weights."""

import os
from pathlib import Path


class CacheDirectoryError(OSError):
    """The directory cannot be used; the message says why, and what would help."""


def cache_directory(name: str) -> Path:
    """Made if need be, for this user alone: whoever could write here could run code in every worker.

    $OCTAVO_CACHE_DIR/name, or octavo/name in $XDG_CACHE_HOME or ~/.cache. Raises CacheDirectoryError.
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
            f"{directory} cannot be used ({error}): set OCTAVO_CACHE_DIR to one of yours"
        ) from None
    if status.st_uid != os.getuid():
        raise CacheDirectoryError(f"{directory} belongs to another user: set OCTAVO_CACHE_DIR to a directory of yours")
    return directory
