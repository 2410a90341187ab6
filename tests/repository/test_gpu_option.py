"""pytest --gpu, which forbids the silent fallback to Triton's interpreter."""

import os
import subprocess
import sys

from tests.support.gpu.gpu import DEVICE
from tests.support.repository import ROOT


def _collected(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider", *options]
    return subprocess.run(
        [*command, "tests/kernels/test_recording.py"],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_gpu_fails_where_kernels_would_be_interpreted() -> None:
    run = _collected("--gpu", TRITON_INTERPRET="1")
    assert run.returncode == 4, run.stdout + run.stderr
    assert "kernels would be interpreted" in run.stderr
    assert "test_recording" not in run.stdout, "tests were collected"


def test_without_it_the_header_says_how_kernels_run() -> None:
    run = _collected("-v")
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"Triton kernels: {'interpreted' if DEVICE == 'cpu' else 'on a GPU'}" in run.stdout
