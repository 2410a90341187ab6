"""Packed weights of earlier starts, in files that the next start reads instead of dequantizing and packing again.

SmolLM2 (4 bits in its GGUF file, 330 MB packed in bfloat16) is there after 0.4 s of one core's work instead of 1.9.
A file is one model in one quantization on one path of kernels, made by sources as they are now. All that goes wrong
here costs a warning and the time to pack, never a start.
"""

import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from kernels.cache_directory import CacheDirectoryError, cache_directory
from worker.weights.weight_file import DamagedFileError, WeightFile, file_bytes, write_weight_file

_log = logging.getLogger("octavo.worker")

_PACKAGES = Path(__file__).resolve().parents[2]
# Less than this is packed in no time.
_SMALLEST = 16 * 2**20
_SUFFIX = ".safetensors"
# What other sources packed of a model goes when it has not been used for so long, room or not.
_OUTDATED_S = 24 * 3600.0
_UNFINISHED = ".writing-"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedModel:
    """What packed weights are of, and for. digest: of the weight files. path: the name of the compute path."""

    digest: str
    quantization: str
    path: str

    @property
    def stem(self) -> str:
        """The part of a file's name that stays when the sources change."""
        return f"{self.digest[:24]}-{self.quantization}-{self.path}"


class WeightCache:
    """The files of one directory."""

    def __init__(self, directory: Path, max_bytes: int, *, smallest: int | None = None) -> None:
        """max_bytes: of all files together; the least recently used go first. smallest: a model that takes less is not
        kept."""
        self.directory, self._max_bytes = directory, max_bytes
        self._smallest = _SMALLEST if smallest is None else smallest

    def find(self, model: PackedModel) -> WeightFile | None:
        """The open file of a model; None if there is none that can be used."""
        path = self._file(model)
        try:
            found = WeightFile(path)
            os.utime(path)
        except FileNotFoundError:
            return None
        except (OSError, DamagedFileError) as error:
            self.discard(path, error)
            return None
        return found

    def discard(self, path: Path, error: Exception) -> None:
        """Of a damaged file: it is deleted, and the weights are packed again."""
        _log.warning("packed weights are made anew: %s", error)
        try:
            path.unlink(missing_ok=True)
        except OSError as cause:
            _log.warning("the damaged file cannot be deleted: %s", cause)

    def keep(self, model: PackedModel, tensors: Mapping[str, torch.Tensor], notes: Mapping[str, str]) -> None:
        """Writes a model's file, unless another process is about to."""
        path, num_bytes = self._file(model), file_bytes(tensors)
        if num_bytes < self._smallest:
            return
        if num_bytes > self._max_bytes:
            _log.info(
                "packed weights are not kept for the next start: they take %.2f GiB, weight_cache allows %.2f",
                num_bytes / 2**30, self._max_bytes / 2**30,
            )  # fmt: skip
            return
        try:
            with self._locked() as is_ours:
                if is_ours and not path.exists():
                    self._make_room(model, num_bytes)
                    self._write(path, tensors, notes)
        except OSError as error:
            _log.warning(
                "packed weights cannot be kept for the next start: %s; free some space, set OCTAVO_CACHE_DIR to a "
                "directory with %.1f GiB, or set weight_cache=0", error, num_bytes / 2**30,
            )  # fmt: skip

    def _file(self, model: PackedModel) -> Path:
        return self.directory / f"{model.stem}-{_sources_digest()}{_SUFFIX}"

    @contextmanager
    def _locked(self) -> Iterator[bool]:
        """Whether this process may write. It does not wait for another: ranks and replicas of one model start
        together, and one of them is enough."""
        with (self.directory / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True

    def _make_room(self, model: PackedModel, num_bytes: int) -> None:
        # Nobody else writes: what is unfinished was left by a process that was killed.
        for path in self.directory.glob(f"{_UNFINISHED}*"):
            path.unlink()
        for path in self.directory.glob(f"{model.stem}-*{_SUFFIX}"):
            # Another installation's may be in use.
            if time.time() - path.stat().st_mtime > _OUTDATED_S:
                path.unlink()
        kept = sorted(self.directory.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)
        sizes = [path.stat().st_size for path in kept]
        excess = sum(sizes) + num_bytes - self._max_bytes
        for path, size in zip(kept, sizes, strict=True):
            if excess <= 0:
                break
            path.unlink()
            excess -= size
        free = shutil.disk_usage(self.directory).free
        if free < 2 * num_bytes:
            raise OSError(f"{self.directory} has {free / 2**30:.1f} GiB left")

    def _write(self, path: Path, tensors: Mapping[str, torch.Tensor], notes: Mapping[str, str]) -> None:
        handle, unfinished = tempfile.mkstemp(dir=self.directory, prefix=_UNFINISHED)
        try:
            with os.fdopen(handle, "wb") as file:
                write_weight_file(file, tensors, notes)
            os.replace(unfinished, path)
        finally:
            Path(unfinished).unlink(missing_ok=True)


def open_weight_cache(gib: float) -> WeightCache | None:
    """gib: the option weight_cache. None, with a warning, if there is no directory for it; or if it is 0."""
    if not gib:
        return None
    try:
        return WeightCache(cache_directory("weights"), int(gib * 2**30))
    except CacheDirectoryError as error:
        _log.warning("packed weights cannot be kept for the next start: %s", error)
        return None


@cache
def _sources_digest() -> str:
    """Of everything that decides what packed weights look like: our sources, and torch, which quantizes."""
    digest = hashlib.sha256(torch.__version__.encode())
    for package in ("kernels", "worker"):
        for path in sorted((_PACKAGES / package).rglob("*")):
            if path.suffix in (".py", ".h", ".cpp"):
                digest.update(f"{path.relative_to(_PACKAGES)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
