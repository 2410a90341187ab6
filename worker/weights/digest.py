"""Digests of weight files: by content for a replica's fingerprint, also by date for the cache of one machine."""

import hashlib
import logging
import re
from collections.abc import Iterable
from pathlib import Path

_log = logging.getLogger("octavo.worker")

# Larger files are digested by their size and their first and last MiB: reading them in full would double their loading
# time.
WHOLE_BELOW = 2**30
EDGE = 2**20
# Smaller files are read so quickly that remembering their digests saves nothing.
REMEMBERED_FROM = 16 * 2**20
_SHA256 = re.compile(r"[0-9a-f]{64}")


def files_digest(files: Iterable[Path], remember: Path | None = None) -> str:
    """Returns the sha256, in hex, over the names, sizes and contents of the files, in order of their names.

    remember: a directory for digests of large files, so that later calls do not read unchanged files again.
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
    """Returns a file's digest, remembered under what changes when the file is written or replaced: the kernel sets
    ctime, and no call can set it back."""
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
    """Extends a files_digest by the modification times of large files, because it reads only parts of them."""
    times = {file.name: stat.st_mtime_ns for file in files if (stat := file.stat()).st_size >= WHOLE_BELOW}
    return hashlib.sha256(f"{digest} {sorted(times.items())}".encode()).hexdigest()
