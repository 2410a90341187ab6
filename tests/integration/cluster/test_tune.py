"""`octavo tune` on real clusters of a tiny model: interrupted, resumed, and its report."""

import gzip
import json
import re
import signal
import subprocess
import time
from pathlib import Path

import yaml

from tests.support.models.tiny_model import make_tiny_model
from tests.support.up import COMMAND, environment

_TIMEOUT = 240.0


def start(directory: Path, *more: str) -> subprocess.Popen[str]:
    model = make_tiny_model(directory / "tiny")
    return subprocess.Popen(
        [
            *COMMAND,
            "tune",
            f"--model={model}",
            "--load-format=dummy",
            "--dtype=float32",
            "--kv-cache-memory=0.01",
            "--worker-threads=1",
            "--max-num-seqs=2,8",
            "--max-num-batched-tokens=64",
            "--num-requests=12",
            "--prompt-len=16",
            "--output-len=8",
            "--max-e2e-ms=60000",
            "--rounds=1",
            f"--output={directory}/tuned",
            *more,
        ],
        env=environment(),
        cwd=directory,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_an_interrupted_run_is_resumed_and_reports(tmp_path: Path) -> None:
    state = tmp_path / "tuned" / "state.jsonl"
    first = start(tmp_path)
    deadline = time.monotonic() + _TIMEOUT
    while (
        first.poll() is None and time.monotonic() < deadline and not (state.exists() and "probe" in state.read_text())
    ):
        time.sleep(0.05)
    first.send_signal(signal.SIGINT)
    _, err = first.communicate(timeout=_TIMEOUT)
    assert first.returncode == 130, err
    assert "the same command goes on from there" in err
    measured = len(state.read_text().splitlines())
    assert measured >= 2

    second = start(tmp_path, "--json")
    out, err = second.communicate(timeout=_TIMEOUT)
    assert second.returncode == 0, err
    lines = state.read_text().splitlines()
    # The probe was not made again.
    assert sum('"key": "probe' in line for line in lines) == 1
    assert len(lines) > measured
    (line,) = out.splitlines()
    report = json.loads(line)
    best = report["best"]
    assert best["max_num_seqs"] in (2, 8)
    assert best["tok_s_within_bounds"] > 0
    assert {row["status"] for row in report["settings"]} <= {"best", "finalist", "skipped"}
    assert all("predicted" in row for row in report["settings"])
    folder = tmp_path / "tuned"
    assert json.loads((folder / "report.json").read_text()) == report
    options = yaml.safe_load((folder / "best.yaml").read_text())
    assert options["max_num_seqs"] == best["max_num_seqs"]
    assert options["load_format"] == "dummy"
    page = (folder / "report.html").read_text()
    assert page.count("<svg") == 3
    # Nothing is fetched: addresses are names of XML only.
    names = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert set(re.findall(r"https?://[^\s\"'<)]+", page)) <= names
    with gzip.open(folder / "profile.json.gz", "rt") as trace:
        assert "traceEvents" in json.load(trace)


def test_a_sweep_writes_a_table_and_a_plot(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny")
    result = subprocess.run(
        [
            *COMMAND,
            "bench",
            "sweep",
            f"--model={model}",
            "--load-format=dummy",
            "--dtype=float32",
            "--kv-cache-memory=0.01",
            "--worker-threads=1",
            "--set=max_num_seqs=4",
            "--request-rate=50,inf",
            "--num-requests=8",
            "--prompt-len=8",
            "--output-len=4",
            f"--output={tmp_path}/swept",
            "--json",
        ],
        env=environment(),
        cwd=tmp_path,
        text=True,
        capture_output=True,
        check=False,
        timeout=_TIMEOUT,
    )
    assert result.returncode == 0, result.stderr
    slow, fast = map(json.loads, result.stdout.splitlines())
    assert (slow["request_rate"], fast["request_rate"]) == (50.0, "inf")
    assert (slow["max_num_seqs"], slow["num_errors"], slow["num_requests"]) == ("4", 0, 8)
    assert slow["output_tok_s"] > 0
    # The second measurement has the prompts of the first one, and finds none of them.
    assert fast["prefix_hit_rate"] == 0
    assert len((tmp_path / "swept" / "sweep.csv").read_text().splitlines()) == 3
    assert (tmp_path / "swept" / "sweep.png").stat().st_size > 1000
