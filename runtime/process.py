"""What a process owes the machine it runs on: private directories, and no orphans."""

import ctypes
import os
import signal
import stat
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Has the kernel send this process SIGTERM when its parent ends, however that ends. Linux only.

    parent_pid: the parent as it was at the fork; if it has gone already, this process exits at once.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        sys.exit("octavo: the parent process has ended")


def private_directory(path: Path) -> Path:
    """Makes a directory of mode 0700, or checks that one is ours and closed to others. Raises PermissionError."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat()
    if found.st_uid != os.getuid():
        raise PermissionError(f"runtime_dir={str(path)!r} belongs to another user: name a directory of your own")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(
            f"runtime_dir={str(path)!r} is open to others (mode {stat.S_IMODE(found.st_mode):o}): "
            f"`chmod 700` it, or name another directory"
        )
    return path
