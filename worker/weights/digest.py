"""A name for what is in weight files, so that replicas of equal weights can be told."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

# Files from here on count by their size and their first and last MiB: reading all of a large one would double its
# loading time.
WHOLE_BELOW = 2**30
EDGE = 2**20


def files_digest(files: Iterable[Path]) -> str:
    """sha256, in hex, over the names, sizes and contents of the files, in order of their names."""
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.name):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            if size < WHOLE_BELOW:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
            else:
                digest.update(stream.read(EDGE))
                stream.seek(-EDGE, 2)
                digest.update(stream.read(EDGE))
    return digest.hexdigest()
