"""A node of a Ray cluster is removed while streams run through the router on another node, or a worker dies again and
again: all streams are exact, and `octavo up` goes on.

Real processes on three nodes of this machine, as in `python -m benchmarks.faults.ray_nodes`. Ray is an optional
dependency of 240 MB; without it this test is skipped.
"""

import importlib.util
import json
import subprocess
import sys

import pytest

from tests.support.ports import free_port
from tests.support.repository import ROOT
from tests.support.up import environment

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="pip install 'octavo[ray]'")


@pytest.mark.parametrize("fault", [(), ("--kills=12",)], ids=["a lost node", "a worker that dies again and again"])
def test_streams_survive(fault: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "benchmarks.faults.ray_nodes", "--json", "--streams=4", "--tokens=400", *fault]
    done = subprocess.run(
        [*command, f"--port={free_port()}"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["equal"]
