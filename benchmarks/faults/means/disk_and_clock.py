"""A directory whose disk can be full, and a wall clock that can be set, for the processes of one cluster."""

import errno
import os
import resource
import shutil
import struct
import subprocess
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import psutil

_FILLER = "filler"
_ZEROS = bytes(2**20)
_SHIM = Path(__file__).with_name("clock_shim.c")


class SmallDisk:
    """A tmpfs of its own where this process may mount one. Elsewhere, a limit on the size of files (RLIMIT_FSIZE) in
    the processes that write: they get EFBIG instead of ENOSPC. Leaving the context unmounts it."""

    def __init__(self, path: Path, *, mebibytes: int) -> None:
        self.path = path
        path.mkdir(mode=0o700)
        options = f"size={mebibytes}m,mode=700"
        mounting = ["mount", "-t", "tmpfs", "-o", options, "octavo-grey", str(path)]
        self.is_mounted = os.getuid() == 0 and subprocess.run(mounting, capture_output=True).returncode == 0

    def __enter__(self) -> "SmallDisk":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if self.is_mounted:
            subprocess.run(["umount", "--lazy", str(self.path)], check=True)

    @property
    def means(self) -> str:
        return "tmpfs" if self.is_mounted else "RLIMIT_FSIZE"

    def fill(self, writers: Iterable[psutil.Process]) -> None:
        """Leaves no byte free. writers: the processes that write there."""
        if not self.is_mounted:
            _limit_files(writers, 0)
            return
        with (self.path / _FILLER).open("ab", buffering=0) as file:
            try:
                while file.write(_ZEROS):
                    pass
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise

    def free(self, writers: Iterable[psutil.Process]) -> None:
        if not self.is_mounted:
            _limit_files(writers, resource.RLIM_INFINITY)
        (self.path / _FILLER).unlink(missing_ok=True)


def _limit_files(writers: Iterable[psutil.Process], size: int) -> None:
    for each in writers:
        try:
            _, hard = each.rlimit(psutil.RLIMIT_FSIZE)
            each.rlimit(psutil.RLIMIT_FSIZE, (size if hard == resource.RLIM_INFINITY else min(size, hard), hard))
        except psutil.NoSuchProcess:
            continue


def why_no_clock() -> str:
    """Says what this machine lacks; empty: nothing."""
    return "" if shutil.which("gcc") else "no gcc, which compiles the shim of the clock"


class FakeClock:
    """Starts with the true time. `environment` is for the processes that shall see it."""

    def __init__(self, directory: Path) -> None:
        """Raises CalledProcessError if the shim can't be compiled."""
        self._file = directory / "clock"
        self._file.write_bytes(struct.pack("=q", 0))
        self.environment: dict[str, str] = {}
        if not why_no_clock():
            library = directory / "clock_shim.so"
            subprocess.run(
                ["gcc", "-O1", "-shared", "-fPIC", "-o", str(library), str(_SHIM), "-ldl", "-lpthread"], check=True
            )
            self.environment = {"LD_PRELOAD": str(library), "GREY_CLOCK_FILE": str(self._file)}

    def set_to(self, seconds: float) -> None:
        """Sets the clock to so many seconds after the true time."""
        with self._file.open("r+b") as file:
            file.write(struct.pack("=q", round(seconds * 1e9)))
