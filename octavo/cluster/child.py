"""The first program in a child of `octavo up`: it ties its life to the launcher's, then execs the real program.

    python -I -S octavo/cluster/child.py LAUNCHER_PID SIGNAL PROGRAM [ARGUMENT ...]

SIGNAL is the number of the signal that the child gets when the launcher ends.

The tie (PR_SET_PDEATHSIG) survives exec. Setting it here avoids code between fork and exec, which is unsafe in a
program with threads. This file runs without site-packages and imports none of our modules: an import would cost each
process of a cluster 30 ms.
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
