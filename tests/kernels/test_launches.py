"""Counts what Python does for a launch, with a driver that launches nothing, in a process that does not interpret."""

import json
import os
import subprocess
import sys

from tests.support.repository import ROOT


def test_a_launch_looks_its_code_up_and_passes_on_its_arguments() -> None:
    """It launches what Triton's own code launches, and makes fewer calls: 8 in Python and 13 in C with Triton 3.6 to
    3.9, where Triton's makes 12 to 14, and 16 to 18, and turns its options to text."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.gpu.null_driver"],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    counted = json.loads(run.stdout)
    assert counted["is_same"]
    # Dtypes, alignments, 1 and multiples of 16, 64 bits, constants and options have code of their own; other values of
    # floats, and of integers that are not specialized, do not.
    assert counted["kernels"] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 0]
    (calls, c_calls), (triton_calls, triton_c_calls) = counted["calls"], counted["triton_calls"]
    assert calls <= 8 < triton_calls
    assert c_calls <= 13 < triton_c_calls
