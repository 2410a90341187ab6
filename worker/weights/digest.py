"""Digests of weight files: by content for a replica's fingerprint, by date for the cache of one machine."""

import hashlib
import logging
import re
from collections.abc import Iterable
from pathlib import Path

_log = logging.getLogger("octavo.worker")

# Files from here on count by their size and their first and last MiB: reading all of a large one would double its
# loading time.
WHOLE_BELOW = 2**30
EDGE = 2**20
# Smaller ones are read in less time than remembering saves.
REMEMBERED_FROM = 16 * 2**20
_SHA256 = re.compile(r"[0-9a-f]{64}")


def files_digest(files: Iterable[Path], remember: Path | None = None) -> str:
    """sha256, in hex, over the names, sizes and contents of the files, in order of their names.

    remember: a directory in which the digests of large files are kept, so that a later call need not read them again
    as long as they stay as they are.
    """
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.name):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        if size >= WHOLE_BELOW:
            with file.open("rb") as stream:
                digest.update(stream.read(EDGE))
                stream.seek(-EDGE, 2)
                digest.update(stream.read(EDGE))
        elif remember is not None and size >= REMEMBERED_FROM:
            digest.update(_remembered(file, remember))
        else:
            digest.update(_sha256(file))
    return digest.hexdigest()


def _sha256(file: Path) -> bytes:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()


def _remembered(file: Path, directory: Path) -> bytes:
    """By what changes with any write to a file or in its place: the kernel sets ctime, and no call sets it back."""
    status = file.stat()
    identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    note = directory / f"{hashlib.sha256(repr(identity).encode()).hexdigest()[:32]}.digest"
    try:
        if _SHA256.fullmatch(known := note.read_text()):
            return bytes.fromhex(known)
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        _log.warning("the digest of %s is computed again: %s", file, error)
    digest = _sha256(file)
    try:
        note.write_text(digest.hex())
    except OSError as error:
        _log.warning("the digest of %s cannot be kept: %s", file, error)
    return digest


def dated_digest(digest: str, files: Iterable[Path]) -> str:
    """From a files_digest: of large files, which that sees in parts, the times of their last change count, too."""
    times = {file.name: stat.st_mtime_ns for file in files if (stat := file.stat()).st_size >= WHOLE_BELOW}
    return hashlib.sha256(f"{digest} {sorted(times.items())}".encode()).hexdigest()
