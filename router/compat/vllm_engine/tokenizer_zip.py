"""A tokenizer's files as one archive."""

import hashlib
import io
import zipfile
from pathlib import Path

_PATTERNS = ("*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken")
# Checkpoints keep such among them: an index of weights has megabytes, and nobody tokenizes with it.
_NOT = "*.safetensors.index.json"
# The same files make the same archive, and so the same sha256, whenever and wherever it is made.
_DATE = (1980, 1, 1, 0, 0, 0)


def tokenizer_zip(directory: Path) -> tuple[bytes, str]:
    """The archive of a directory with a tokenizer.json, and its sha256 in hexadecimal. Reads the files; takes a second
    for a large vocabulary."""
    paths = {path for pattern in _PATTERNS for path in directory.glob(pattern) if not path.match(_NOT)}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(paths):
            if path.is_file():
                archive.writestr(zipfile.ZipInfo(path.name, _DATE), path.read_bytes(), zipfile.ZIP_DEFLATED)
    data = buffer.getvalue()
    return data, hashlib.sha256(data).hexdigest()
