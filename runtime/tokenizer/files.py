"""Finds a model's tokenizer as plain files (tokenizer.json and others); converts and caches it if there are none.

Conversion (GGUF, sentencepiece) imports transformers and torch, takes seconds and hundreds of MB: it runs once, in a
process of its own, and its result is kept. So a process starts in a second and stays small.
"""

import hashlib
import logging
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from runtime.model_files import ModelFiles
from runtime.process import cache_directory

log = logging.getLogger("octavo.tokenizer")

# Part of the cache key: raise it when the cached files change.
_CACHE_VERSION = 1
_CONVERSION_TIMEOUT_S = 300
_CONVERTIBLE = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


class TokenizerError(ValueError):
    """The tokenizer can't be found or used; the message says what would work."""


def tokenizer_exists(model: ModelFiles, tokenizer: str = "") -> bool:
    """Returns True if `tokenizer_directory` will find files to read or to convert. Reads none."""
    source = Path(tokenizer).expanduser() if tokenizer else model.path
    return source.is_file() or any((source / name).is_file() for name in ("tokenizer.json", *_CONVERTIBLE))


def tokenizer_directory(model: ModelFiles, tokenizer: str = "") -> Path:
    """Returns a directory with tokenizer.json, and tokenizer_config.json and chat_template.jinja if the model has them.

    tokenizer: option of that name, a directory that replaces the model's own files.
    Raises TokenizerError.
    """
    source = model.path
    if tokenizer:
        source = Path(tokenizer).expanduser()
        if not source.is_dir():
            raise TokenizerError(f"tokenizer={tokenizer!r}: no such directory; name one with a tokenizer.json")
    if source.is_dir():
        if (source / "tokenizer.json").is_file():
            return source
        if not any((source / name).is_file() for name in _CONVERTIBLE):
            raise TokenizerError(
                f"{source} has no tokenizer.json (nor {', '.join(_CONVERTIBLE)}): "
                f"set the option `tokenizer` to a directory that has one"
            )
    return _converted(source)


def _converted(source: Path) -> Path:
    kept = cache_directory() / "tokenizers" / _digest(source)
    if kept.is_dir():
        return kept
    log.info("converting the tokenizer of %s, once; it will be kept in %s", source.name, kept)
    try:
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix="new-", dir=kept.parent))
    except OSError as error:
        raise TokenizerError(
            f"can't keep a converted tokenizer in {kept.parent}: {error.strerror}; "
            f"set OCTAVO_CACHE_DIR to a directory you can write to"
        ) from None
    try:
        _convert(source, fresh)
        try:
            fresh.rename(kept)
        except OSError:
            # Another process was faster; its result is as good.
            if not kept.is_dir():
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return kept


def _digest(source: Path) -> str:
    """Hashes names, sizes, times and first MiB of a GGUF file or of a directory's files, instead of gigabytes."""
    digest = hashlib.sha256(f"octavo tokenizer {_CACHE_VERSION}\n".encode())
    paths = [source]
    if source.is_dir():
        paths = sorted(path for path in source.iterdir() if path.is_file() and path.suffix != ".safetensors")
    for path in paths:
        stat = path.stat()
        digest.update(f"{path.name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(2**20))
    return digest.hexdigest()[:32]


def _convert(source: Path, target: Path) -> None:
    command = [sys.executable, "-m", f"{__package__}.convert", str(source), str(target)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_CONVERSION_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise TokenizerError(f"converting the tokenizer of {source} took more than {_CONVERSION_TIMEOUT_S} s") from None
    if done.returncode != 0 or not (target / "tokenizer.json").is_file():
        lines = done.stderr.strip().splitlines()
        raise TokenizerError(
            f"the tokenizer of {source} can't be converted: {lines[-1] if lines else 'it wrote no tokenizer.json'}; "
            f"set the option `tokenizer` to a directory with a tokenizer.json"
        )
