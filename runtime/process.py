"""Helpers of a process: its age, its end, its limits, and private directories."""

import contextlib
import os
import resource
import signal
import stat
import sys
import time
from pathlib import Path
from typing import NoReturn


def seconds_alive() -> float:
    """Seconds since this process was forked, in steps of 10 ms, including the time before its first line of Python.
    Linux only; 0.0 elsewhere."""
    if sys.platform != "linux":
        return 0.0
    # proc(5): the third field follows the name, which is in parentheses and may contain anything.
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[22 - 3]) / os.sysconf("SC_CLK_TCK")


def end_process(code: int) -> NoReturn:
    """Ends the process with this exit code, also if a stop signal comes now.

    Python restores the signals' default actions before it ends. A worker that its scheduler had ended was then killed
    by the SIGTERM of `docker compose stop`, and its exit code 143 looked like a failure.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    sys.exit(code)


def raise_open_files() -> int:
    """Raises the limit of open files to what the system allows this process. Returns the limit in force.

    The usual soft limit of 1,024 is for programs that call select(); a router holds a descriptor for each connection.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # macOS refuses "no limit".
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def most_connections(wanted: int) -> int:
    """Returns how many connections of one kind a process may have: as many as are wanted, but at most three quarters of
    its open files."""
    return max(1, min(wanted, raise_open_files() * 3 // 4))


def private_directory(path: Path) -> Path:
    """Makes a directory of mode 0700, or checks that an existing one is ours and closed to others.

    Raises PermissionError.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat()
    if found.st_uid != os.getuid():
        raise PermissionError(f"runtime_dir={str(path)!r} belongs to another user: give a directory of your own")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(
            f"runtime_dir={str(path)!r} is open to others (mode {stat.S_IMODE(found.st_mode):o}): "
            f"`chmod 700` it, or give another directory"
        )
    return path


def cache_directory() -> Path:
    """The directory for what is kept between starts: OCTAVO_CACHE_DIR, or ~/.cache/octavo."""
    given = os.environ.get("OCTAVO_CACHE_DIR")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "octavo"
