"""The first thing a child of `octavo up` runs: it ties its life to the launcher's, then becomes the real program.

    python -I -S octavo/cluster/child.py LAUNCHER_PID SIGNAL PROGRAM [ARGUMENT ...]

SIGNAL, a number, is what it gets when the launcher has ended.

The tie (PR_SET_PDEATHSIG) outlives exec. Done here, in the child, it needs no code between fork and exec, which is
unsafe in a program with threads. Run as a file, without site-packages, and alone: importing a module of ours to do it
would cost each process of a cluster 30 ms.
"""

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    launcher, death_signal = int(sys.argv[1]), int(sys.argv[2])
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, death_signal, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != launcher:
        sys.exit("octavo: the launcher has ended")
    os.execv(sys.argv[3], sys.argv[3:])


if __name__ == "__main__":
    main()
