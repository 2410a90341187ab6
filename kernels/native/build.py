"""Picks the C++ source for this CPU's instructions, compiles it once and caches the library under a digest of its
sources.
"""

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
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from kernels.native.amx import may_use_tiles
from kernels.native.cache_directory import CacheDirectoryError, cache_directory


@dataclass(frozen=True, slots=True, kw_only=True)
class NativePath:
    """A set of kernels: one C++ file, compiled for some instructions."""

    # Appears in fingerprints and log lines.
    name: str
    source: str
    # The instructions, by their names in /proc/cpuinfo.
    cpu_flags: frozenset[str]
    compiler_flags: tuple[str, ...]
    # True if linears with bfloat16 weights round their inputs.
    rounds_inputs: bool
    # True if attention over a bfloat16 cache rounds queries and weights to bfloat16.
    rounds_queries: bool
    # Instructions of the CPUs on which a later path is faster.
    slow_with: frozenset[str] = frozenset()


_AVX512_CPU = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "fma", "f16c"})
_AVX512_COMPILER = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mfma", "-mf16c")

_AVX512_BF16_CPU, _AVX512_BF16_COMPILER = _AVX512_CPU | {"avx512_bf16"}, (*_AVX512_COMPILER, "-mavx512bf16")

# A CPU's path is the first one that it can run and that is not slow there.
PATHS = (
    # Intel's Xeons from Sapphire Rapids on.
    NativePath(
        name="amx-bf16",
        source="amx_bf16.cpp",
        cpu_flags=_AVX512_BF16_CPU | {"amx_tile", "amx_bf16", "amx_int8"},
        compiler_flags=(*_AVX512_BF16_COMPILER, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
        rounds_inputs=True,
        rounds_queries=True,
    ),
    # AMD from Zen 4 on; Intel's Cooper Lake. Where there is AMX, vdpbf16ps has half the rate of float32's fma, and the
    # next path is up to 1.6 times as fast: it computes if the tiles may not be used.
    NativePath(
        name="avx512-bf16",
        source="avx512_bf16.cpp",
        cpu_flags=_AVX512_BF16_CPU,
        compiler_flags=_AVX512_BF16_COMPILER,
        rounds_inputs=True,
        rounds_queries=True,
        slow_with=frozenset({"amx_tile"}),
    ),
    # Intel's Cascade Lake, Ice Lake and Tiger Lake.
    NativePath(
        name="avx512-vnni",
        source="avx512_vnni.cpp",
        cpu_flags=_AVX512_CPU,
        compiler_flags=_AVX512_COMPILER,
        rounds_inputs=False,
        rounds_queries=False,
    ),
    NativePath(
        name="avx2",
        source="avx2.cpp",
        cpu_flags=frozenset({"avx2", "fma", "f16c"}),
        compiler_flags=("-mavx2", "-mfma", "-mf16c"),
        rounds_inputs=True,
        rounds_queries=False,
    ),
)


def path_of_this_cpu() -> NativePath | None:
    """The best path for this CPU, or None if no kernels support it."""
    flags, all_flags = flags_of_this_cpu(), _cpuinfo_flags()
    return next((path for path in PATHS if path.cpu_flags <= flags and not path.slow_with & all_flags), None)


def flags_of_this_cpu() -> frozenset[str]:
    """The instructions that this process may use, by their names in /proc/cpuinfo; empty where there is no such
    file."""
    flags = _cpuinfo_flags()
    if "amx_tile" in flags and not may_use_tiles():
        return frozenset(flag for flag in flags if not flag.startswith("amx_"))
    return flags


def _cpuinfo_flags() -> frozenset[str]:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return frozenset()
    for line in cpuinfo.read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


_log = logging.getLogger("octavo.kernels")

_KERNELS = Path(__file__).resolve().parent.parent
# Filled by `python -m kernels.native.ship`; the compiler's version is not in these names, as there may be no compiler.
_SHIPPED = _KERNELS / "native" / "shipped"
# No contraction: the sources write fused multiply-adds explicitly. Otherwise two instantiations of one template could
# round differently.
_FLAGS = (
    "-O3",
    "-std=c++17",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-exceptions",
    "-fno-rtti",
    "-fvisibility=hidden",
    "-fPIC",
    "-shared",
    "-pthread",
)
_TIMEOUT_S = 300
_VERSION_TIMEOUT_S = 60
# Another process may be compiling another path first.
_LOCK_TIMEOUT_S = 2 * _TIMEOUT_S
_LOCK_POLL_S = 0.05


class BuildError(Exception):
    """The kernels could not be built here; the message says why, and what would help."""


def build(path: NativePath) -> Path:
    """Returns the shared library of a path: shipped, from the cache, or built now. Raises BuildError."""
    if (shipped := _shipped(path)).exists():
        return shipped
    compiler = find_compiler()
    version = compiler_version(compiler)
    try:
        directory = cache_directory("kernels")
    except CacheDirectoryError as error:
        raise BuildError(str(error)) from None
    library = directory / f"{path.name}-{_digest(path, version)}.so"
    if library.exists():
        return library
    with _locked(directory / "lock"):
        if not library.exists():  # another process may have built it meanwhile
            _compile(compiler, path, library)
    return library


def ship(path: NativePath) -> Path:
    """Compiles a path into this package, where every user may read it. Raises BuildError."""
    library = _shipped(path)
    library.parent.mkdir(exist_ok=True)
    _compile(find_compiler(), path, library)
    library.chmod(0o755)
    return library


def _shipped(path: NativePath) -> Path:
    """The place of a path's library in an image. Sources that differ from those it was built of give another name."""
    return _SHIPPED / f"{path.name}-{_digest(path, '')}.so"


def find_compiler() -> str:
    """Returns the path of the C++ compiler that kernels are built with. Raises BuildError."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    raise BuildError("there is no C++ compiler: install one (Debian and Ubuntu: apt-get install g++)")


def compiler_version(compiler: str) -> str:
    """Returns what `--version` prints. Raises BuildError."""
    try:
        return subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, check=False, timeout=_VERSION_TIMEOUT_S
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the compiler does not say its version: {error}") from None


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
    """Raises BuildError if another process keeps the lock."""
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    with file.open("w") as lock:
        # The lock is released when the process ends, however it ends; one that is stopped keeps it.
        while not _takes(lock):
            if time.monotonic() >= deadline:
                raise BuildError(
                    f"another process has held the lock {file} for {_LOCK_TIMEOUT_S:g} s: end the one that compiles "
                    "there (fuser shows it)"
                )
            time.sleep(_LOCK_POLL_S)
        yield


def _takes(lock: TextIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _compile(compiler: str, path: NativePath, library: Path) -> None:
    _log.info("compiling CPU kernels (%s) with %s, once", path.name, compiler)
    start = time.monotonic()
    # In the same directory, so that os.replace publishes the finished library atomically.
    handle, unfinished = tempfile.mkstemp(dir=library.parent, prefix=".building-", suffix=".so")
    os.close(handle)
    native = _KERNELS / "native" / "cpp"
    command = [
        compiler,
        *_FLAGS,
        *path.compiler_flags,
        str(native / path.source),
        str(native / "pool.cpp"),
        "-o",
        unfinished,
    ]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if result.returncode != 0:
            cause = (result.stderr.strip() or f"exit code {result.returncode}").splitlines()[0]
            raise BuildError(f"{compiler} does not compile the CPU kernels ({cause}): g++ 11 or newer does")
        os.replace(unfinished, library)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the CPU kernels cannot be built: {error}") from None
    finally:
        Path(unfinished).unlink(missing_ok=True)
    _log.info("compiled CPU kernels in %.1f s, kept as %s", time.monotonic() - start, library)
