"""Runs tests in forks of a process that has already imported pytest, torch and Triton. A script, used over its pipes.

    python -P tests/support/kernels/fault_server.py < lines of {"directory": DIR, "test": NAME} > lines of {"code": N}

Each test runs in a child, in DIR, with DIR's modules: none of the repository's is imported before the fork. pytest's
output goes to DIR/output.txt, its exit code into the answer. One test at a time. -P keeps this script's folder off
sys.path.
"""

import json
import os
import sys
from pathlib import Path


def main() -> None:
    # For the reason, see tests/conftest.py, which is imported too late for this process.
    if not Path("/dev/nvidiactl").exists():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    import pytest
    import torch  # noqa: F401
    import triton.language  # noqa: F401

    # Other tests should not be slowed down.
    os.nice(10)
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if not child:
            code = 70
            try:
                _enter(request["directory"])
                # A faulty kernel may read any number, so an overflow warning must not count as another error.
                options = ["-x", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning"]
                code = int(pytest.main([*options, request["test"]]))
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                # Skips exit handlers and flushes, which are the parent's.
                os._exit(code)
        _, status = os.waitpid(child, 0)
        print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), flush=True)


def _enter(directory: str) -> None:
    os.chdir(directory)
    sys.path.insert(0, directory)
    os.environ["PYTHONPATH"] = directory
    output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, descriptor in enumerate((nothing, output, output)):
        os.dup2(descriptor, target)


if __name__ == "__main__":
    main()
