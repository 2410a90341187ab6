"""Compiles a set of kernels once and keeps it, by what it was made from."""

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kernels.cache_directory import CacheDirectoryError, cache_directory
from kernels.native.paths import NativePath

_log = logging.getLogger("octavo.kernels")

_KERNELS = Path(__file__).resolve().parent.parent
# No contraction: where a product and a sum may become one operation is written in the sources, or two instantiations of
# one template could round differently.
_FLAGS = (
    "-O3", "-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fno-exceptions", "-fno-rtti",
    "-fvisibility=hidden", "-fPIC", "-shared", "-pthread",
)  # fmt: skip
_TIMEOUT_S = 300


class BuildError(Exception):
    """The kernels could not be built here; the message says why, and what would help."""


def build(path: NativePath) -> Path:
    """The shared library of a path, from the cache or built now. Raises BuildError."""
    compiler = _compiler()
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    try:
        directory = cache_directory("kernels")
    except CacheDirectoryError as error:
        raise BuildError(str(error)) from None
    library = directory / f"{path.name}-{_digest(path, version)}.so"
    if library.exists():
        return library
    with _locked(directory / "lock"):
        if not library.exists():  # nobody else has built it meanwhile
            _compile(compiler, path, library)
    return library


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    raise BuildError("there is no C++ compiler: install one (Debian and Ubuntu: apt-get install g++)")


def _sources() -> list[Path]:
    return sorted(path for suffix in ("*.h", "*.cpp") for path in _KERNELS.rglob(suffix))


def _digest(path: NativePath, compiler_version: str) -> str:
    digest = hashlib.sha256()
    for part in (compiler_version, path.source, *_FLAGS, *path.compiler_flags):
        digest.update(f"{part}\0".encode())
    for source in _sources():
        digest.update(f"{source.relative_to(_KERNELS)}\0".encode() + source.read_bytes())
    return digest.hexdigest()[:24]


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the end of the process, however it comes, lets go of it
        yield


def _compile(compiler: str, path: NativePath, library: Path) -> None:
    _log.info("compiling CPU kernels (%s) with %s, once", path.name, compiler)
    start = time.monotonic()
    # In the same directory, so that the finished library appears under its name in one step.
    handle, unfinished = tempfile.mkstemp(dir=library.parent, prefix=".building-", suffix=".so")
    os.close(handle)
    native = _KERNELS / "native"
    command = [
        compiler, *_FLAGS, *path.compiler_flags, str(native / path.source), str(native / "pool.cpp"), "-o", unfinished,
    ]  # fmt: skip
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if result.returncode != 0:
            said = (result.stderr.strip() or f"exit code {result.returncode}").splitlines()[0]
            raise BuildError(f"{compiler} does not compile the CPU kernels ({said}): g++ 11 or newer does")
        os.replace(unfinished, library)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the CPU kernels cannot be built: {error}") from None
    finally:
        Path(unfinished).unlink(missing_ok=True)
    _log.info("compiled CPU kernels in %.1f s, kept as %s", time.monotonic() - start, library)
