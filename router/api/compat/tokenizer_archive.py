"""The tokenizer's files as one archive, which gateways fetch to tokenize by themselves."""

import asyncio
import hashlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

from router.errors import Unavailable

_PATTERNS = ("*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken")
# Matches the patterns, but is an index of weights: megabytes that no tokenizer needs.
_NOT = "*.safetensors.index.json"
# A fixed date: the same files make the same archive, and sha256, whenever and wherever it is made.
_DATE = (1980, 1, 1, 0, 0, 0)
_CHUNK_BYTES = 64 * 1024


def tokenizer_zip(directory: Path) -> tuple[bytes, str]:
    """Returns the archive of a directory with a tokenizer.json, and its sha256 in hexadecimal. Reads the files; takes a
    second for a large vocabulary."""
    paths = {path for pattern in _PATTERNS for path in directory.glob(pattern) if not path.match(_NOT)}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(paths):
            if path.is_file():
                archive.writestr(zipfile.ZipInfo(path.name, _DATE), path.read_bytes(), zipfile.ZIP_DEFLATED)
    data = buffer.getvalue()
    return data, hashlib.sha256(data).hexdigest()


class TokenizerArchive:
    """Makes the archive once, on a thread, when it is asked for; an error is not cached."""

    def __init__(self) -> None:
        self._made: asyncio.Task[tuple[bytes, str]] | None = None

    async def chunks(self, directory: Path) -> Iterator[tuple[bytes, str]]:
        """Returns parts of the archive, each with the sha256 of the whole if it is the last one, else with an empty
        string. Raises Unavailable."""
        if self._made is None or (self._made.done() and self._made.exception() is not None):
            self._made = asyncio.create_task(asyncio.to_thread(tokenizer_zip, directory))
        try:
            # Several calls may wait for it; one that is cancelled must not cancel it for the others.
            data, sha256 = await asyncio.shield(self._made)
        except OSError as error:
            raise Unavailable(f"the tokenizer's files can't be read: {error.strerror}; try again later") from error
        return _parts(data, sha256)


def _parts(data: bytes, sha256: str) -> Iterator[tuple[bytes, str]]:
    for start in range(0, len(data), _CHUNK_BYTES):
        end = start + _CHUNK_BYTES
        yield data[start:end], sha256 if end >= len(data) else ""
