"""The first thing a child of `octavo up` runs: it ties its life to the launcher's, then becomes the real program.

    python -m octavo.cluster.child LAUNCHER_PID PROGRAM [ARGUMENT ...]

The tie (PR_SET_PDEATHSIG) outlives exec. Done here, in the child, it needs no code between fork and exec, which is
unsafe in a program with threads.
"""

import os
import sys

from runtime.process import die_with_parent


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
