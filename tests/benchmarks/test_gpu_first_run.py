"""The script of what to run first on a GPU: its parts harm one another in no way, and its summary is always there."""

import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from benchmarks.gpu.first_run.summary import targets
from benchmarks.gpu.first_run.trees import state
from benchmarks.gpu.report import Missing
from tests.support.repository import ROOT

_SCRIPT = ROOT / "benchmarks" / "gpu" / "first_run.sh"


def start(out: Path, *flags: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "OUT": str(out), "PREPARED": str(out / "nothing")}
    return subprocess.Popen([_SCRIPT, "--toy", *flags], env=environment, text=True, stdout=subprocess.PIPE)


def packed(out: Path) -> set[str]:
    with tarfile.open(out / "parts.tar.gz") as archive:
        return {Path(name).name for name in archive.getnames()}


def test_a_part_that_dies_harms_no_other(tmp_path: Path) -> None:
    with start(tmp_path, "--only", "environment,nccl", "--fault", "environment") as run:
        output, _ = run.communicate()
    assert run.returncode == 1, output
    summary = (tmp_path / "summary.txt").read_text()
    first, second, *_ = summary.splitlines()
    assert first.startswith("environment ")
    assert "failed, exit code 137" in first
    assert second.startswith("nccl ")
    assert second.endswith("done")
    assert "epoch 2, leave" in summary, "the figures of parts that ended well"
    assert {"nccl.json", "nccl.txt", "environment.txt"} <= packed(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"summary.txt", "parts.tar.gz"}


def test_a_run_that_is_stopped_leaves_a_summary(tmp_path: Path) -> None:
    with start(tmp_path, "--only", "builds,nccl") as run:
        assert run.stdout is not None
        # The script is ready to be stopped when it has made the file.
        while not (tmp_path / "summary.txt").exists():
            assert run.poll() is None
        run.send_signal(signal.SIGTERM)
        output = run.stdout.read()
    assert run.returncode == 1, output
    summary = (tmp_path / "summary.txt").read_text()
    assert "all parts:" in summary
    assert "== targets" in summary
    assert "nccl " not in summary


def test_kernels_of_two_states_are_in_one_process(tmp_path: Path) -> None:
    """The earlier state's modules are its own, and those of now stay what they were."""
    package = tmp_path / "kernels" / "kv_cache"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "layout.py").write_text("FROM = 'before'\nimport kernels.kv_cache\n")
    from kernels.kv_cache import layout

    with state("before", tmp_path) as load:
        assert load("kernels.kv_cache.layout").FROM == "before"
        with pytest.raises(Missing, match=r"no kernels\.kv_cache\.no_such_module"):
            load("kernels.kv_cache.no_such_module")
    assert sys.modules["kernels.kv_cache.layout"] is layout
    with state("now") as load:
        assert load("kernels.kv_cache.layout") is layout
    with pytest.raises(Missing, match="prepare"), state("before", tmp_path / "nowhere"):
        pass


def test_targets_are_read_from_the_parts_rows() -> None:
    case = "Llama-3.1-8B fp8 kv8"
    rows = {
        "models_fp8": [
            {"op": "models", "case": f"{case}, decode, 1 x 512", "way": "graphs, overlap", "tokens_per_s": 260.0},
            {"op": "models", "case": f"{case}, decode, 256 x 512", "way": "graphs, overlap", "tokens_per_s": None},
            {"op": "models", "case": f"{case}, mixed step of 600", "way": "eager, overlap", "ms": 26.0},
            {"op": "models", "case": f"{case}, mixed step of 600", "way": "graphs, overlap", "ms": 13.0},
        ],
        "compare": [
            {"op": "e4m3_decode", "case": "64 x 4096", "way": "before, own tile", "share_of_copy": 0.4},
            {"op": "e4m3_decode", "case": "64 x 4096", "way": "now, own tile", "share_of_copy": 0.7},
        ],
    }
    found = [line.split()[-1] for line in targets(rows).splitlines()]
    assert found == ["met", "measured", "met", "missed"], "'not measured' where JSON has no number"
    assert all(line.endswith("not measured") for line in targets({}).splitlines())
