"""A name for what is in weight files on this machine, for what is kept of them."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from worker.weights import digest as digests


def dated_digest(digest: str, files: Iterable[Path]) -> str:
    """From a files_digest: of large files, which that sees in parts, the times of their last change count, too."""
    times = {file.name: stat.st_mtime_ns for file in files if (stat := file.stat()).st_size >= digests.WHOLE_BELOW}
    return hashlib.sha256(f"{digest} {sorted(times.items())}".encode()).hexdigest()
