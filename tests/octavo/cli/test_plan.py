"""`octavo plan` on the command line: what it prints, draws and refuses."""

import json
import os
import sys
from pathlib import Path

import pytest

from octavo.cli.main import main
from tests.support.repository import ROOT
from tests.support.scheduler.plan import load, record, settings

LLAMA_8B = str(ROOT / "configs" / "models" / "llama-3.1-8b.json")
GPU = ("--gpu", "H200", "--model", LLAMA_8B, "--num-requests", "20", "--output-len", "8")
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def octavo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs `octavo plan` with arguments; gives exit code, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["octavo", "plan", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "100")
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def measured(path: Path) -> Path:
    """Writes a line like `octavo bench throughput --json`, for an engine that takes 10 ms a step plus 1 ms a token."""
    columns = [
        "num_steps",
        "num_decodes",
        "num_prefill_tokens",
        "num_chunks",
        "num_sampled",
        "decode_context",
        "chunk_context",
        "attention_pairs",
        "num_swapped_blocks",
        "seconds",
    ]
    steps = [(d, p) for d in (0, 1, 4, 16) for p in (0, 16, 100) if d or p]
    rows = [[1, d, p, p > 0, d, 0, p, 0, 0, 0.010 + 0.001 * (d + p)] for d, p in steps]
    line = {
        "model": "tiny",
        "engine_settings": {"block_size": 16, "num_blocks": 500, "max_model_len": 512, "kv_cache_memory": 1.0},
        "steps": {"columns": columns, "rows": rows},
    }
    path.write_text(json.dumps(line) + "\n")
    return path


def lines(out: str) -> list[dict]:
    return [json.loads(line) for line in out.splitlines()]


def test_a_fitted_engine_is_predicted(octavo, tmp_path: Path) -> None:
    fit = measured(tmp_path / "steps.jsonl")
    code, out, _ = octavo("--fit", fit, "--num-requests", 1, "--prompt-len", 16, "--output-len", 5, "--json")
    assert code == 0
    (line,) = lines(out)
    assert line["ttft_s"] == pytest.approx(0.010 + 0.016, rel=0.01)
    assert line["itl_ms"] == pytest.approx(11.0, rel=0.01)
    assert (line["num_steps"], line["num_requests"], line["best"]) == (5, 1, True)
    assert line["step_parts"].keys() >= {"each step"}


def test_memory_of_the_measured_engine_scales_with_the_option(octavo, tmp_path: Path) -> None:
    load = ("--fit", measured(tmp_path / "steps.jsonl"), "--num-requests", 8, "--json")
    full, half = (lines(octavo(*load, *more)[1])[0] for more in ((), ("--kv-cache-memory", 0.5)))
    assert half["kv_usage_peak"] == pytest.approx(2 * full["kv_usage_peak"], rel=0.01)


def test_steps_in_time_are_planned_with_the_measured_costs(octavo, tmp_path: Path) -> None:
    """A step of the whole budget takes 0.5 s here."""
    load = ("--fit", measured(tmp_path / "steps.jsonl"), "--num-requests", 40, "--request-rate", 1.5, "--json")
    load = (*load, "--prompt-len", "400", "--output-len", "40")
    free, bounded = (lines(octavo(*load, "--inter-token-latency-target", target)[1])[0] for target in (0, 100))
    assert free["itl_ms_p99"] > 300
    assert bounded["itl_ms_p99"] < 110
    assert bounded["ttft_s_p50"] > free["ttft_s_p50"]


def test_a_grid_has_a_line_for_each_setting_and_one_best(octavo) -> None:
    code, out, _ = octavo(*GPU, "--max-num-seqs", "2,8", "--max_num_batched_tokens", "256,512", "--json")
    assert code == 0
    found = lines(out)
    assert [(line["max_num_seqs"], line["max_num_batched_tokens"]) for line in found] == [
        (2, 256),
        (2, 512),
        (8, 256),
        (8, 512),
    ]
    assert sum(line["best"] for line in found) == 1
    assert {"itl_ms_p99", "ttft_s_p90", "e2e_s_p50", "num_preemptions", "kv_usage_mean", "idle"} <= found[0].keys()


def test_people_get_a_table_that_fits_their_terminal(octavo) -> None:
    code, out, _ = octavo(*GPU, "--max-num-seqs", "2,8")
    assert code == 0
    assert "llama-3.1-8b (8.03 B parameters, 15.0 GiB) on H200, nvlink" in out
    assert "simulated 40 requests in" in out
    assert max(map(len, out.splitlines())) <= 100
    assert octavo(*GPU)[1].count("step time:") >= 3


@pytest.mark.parametrize(
    "grid", [(), ("--max-num-seqs", "2,8"), ("--max-num-seqs", "2,8", "--data-parallel-size", "1,2")]
)
def test_outcomes_are_drawn(octavo, tmp_path: Path, grid: tuple[str, ...]) -> None:
    path = tmp_path / "plan.png"
    code, _, err = octavo(*GPU, *grid, "--plot", path, "--max-itl-ms", 50)
    assert (code, err) == (0, "")
    content = path.read_bytes()
    assert content.startswith(PNG_MAGIC)
    width, height = (int.from_bytes(content[at : at + 4], "big") for at in (16, 20))
    assert width > 1000
    assert height > (1500 if len(grid) > 2 else 1000)


def test_a_layout_is_recommended_with_the_flags_to_type(octavo) -> None:
    code, out, _ = octavo(*GPU, "--num-gpus", 2)
    assert code == 0
    assert "Recommended: TP" in out
    assert "--tensor-parallel-size" in out
    _, out, _ = octavo(*GPU, "--num-gpus", 2, "--json")
    found = lines(out)
    assert len(found) == 3
    assert all(line["reason"] for line in found)


def test_a_layout_that_keeps_no_limit_is_not_recommended(octavo) -> None:
    code, out, _ = octavo(*GPU, "--num-gpus", 2, "--max-ttft-ms", 0.01)
    assert code == 1
    assert "Nothing to recommend" in out


def test_equal_commands_print_equal_predictions(octavo) -> None:
    command = (*GPU, "--prompt-len", "uniform:10:300", "--request-rate", 50, "--seed", 4, "--json")
    one, other = (lines(octavo(*command)[1])[0] for _ in range(2))
    del one["simulated_in_s"], other["simulated_in_s"]
    assert one == other


def test_fewer_bits_a_weight_are_read_faster_and_fit_where_more_do_not(octavo) -> None:
    speeds = {}
    for quantization in ("none", "fp8", "int8", "int4"):
        _, out, _ = octavo(*GPU, "--concurrency", 1, "--quantization", quantization, "--json")
        speeds[quantization] = lines(out)[0]["output_tok_s"]
    assert speeds["none"] < speeds["fp8"] == speeds["int8"] < speeds["int4"]
    small = ("--gpu", "L4", "--model", LLAMA_8B, "--gpu-memory-utilization", "0.5", "--num-requests", 2)
    assert [octavo(*small, "--quantization", each)[0] for each in ("none", "int4")] == [2, 0]


def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, rows: list[str]) -> None:
    """Puts a program in front of all others that answers as nvidia-smi does."""
    header = "\t".join(["", *(f"GPU{number}" for number in range(len(rows))), "CPU Affinity", "NUMA Affinity"])
    matrix = "\n".join([header, *(f"GPU{number}\t{row}\t0-7\t0" for number, row in enumerate(rows))])
    (tmp_path / "topo").write_text(matrix + "\n\nLegend:\n\n  X    = Self\n")
    (tmp_path / "names").write_text(f"{name}\n" * len(rows))
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\n[ "$1" = topo ] && exec cat {tmp_path}/topo\nexec cat {tmp_path}/names\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)


def test_this_machines_gpus_and_links_are_planned_for(octavo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(tmp_path, monkeypatch, "NVIDIA H200", [" X \tNV18", "NV18\t X "])
    load = ("--gpu", "auto", "--model", LLAMA_8B, "--num-requests", "20", "--output-len", "8")
    code, out, _ = octavo(*load)
    assert code == 0
    assert "on H200, nvlink (18 links)" in out
    assert "TP 2 over nvlink (18 links): a token every" in out
    assert "PP 2 over nvlink (18 links): a token every" in out
    assert "take TP 2: " in out
    assert len(lines(octavo(*load, "--json")[1])) == 3
    nvidia_smi(tmp_path, monkeypatch, "NVIDIA H200", [" X \tSYS", "SYS\t X "])
    assert "TP 2 over pcie (SYS): a token every" in octavo(*load)[1]
    nvidia_smi(tmp_path, monkeypatch, "NVIDIA H200", [" X "])
    assert "on H200, nvlink" in octavo(*load)[1]
    nvidia_smi(tmp_path, monkeypatch, "Tesla T4", [" X "])
    code, _, err = octavo(*load)
    assert (code, "this machine has 'Tesla T4'" in err) == (2, True)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    code, _, err = octavo(*load)
    assert (code, "this machine has no nvidia-smi" in err) == (2, True)


def test_cpus_and_tpus_need_no_load(octavo) -> None:
    code, out, _ = octavo("--device", "tpu", "--model", LLAMA_8B, "--max-model-len", 2048)
    assert code == 0
    assert "llama-3.1-8b, max_model_len=2,048: pages of 128 tokens" in out
    assert "16 pages in the longest sequence" in out
    (line,) = lines(octavo("--device", "tpu", "--model", LLAMA_8B, "--json")[1])
    assert (line["block_size"], line["pages_a_sequence"], line["page_bytes"]) == (256, 512, 2 * 256 * 32 * 8 * 128 * 2)
    assert "use max_num_seqs=256" in octavo("--device", "tpu", "--model", LLAMA_8B, "--max-num-seqs", 300)[1]
    code, out, _ = octavo("--device", "cpu", "--model", LLAMA_8B)
    assert (code, "NUMA nodes" in out, "take --" in out) == (0, True, True)
    (line,) = lines(octavo("--device", "cpu", "--model", LLAMA_8B, "--json")[1])
    assert line["num_nodes"] == len(line["memory"]) == len(line["distances"])
    code, _, err = octavo("--device", "tpu", "--gpu", "H200")
    assert (code, "--device=tpu and --gpu: give one of them" in err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give either --fit FILE"),
        (("--gpu", "H200", "--fit", "x"), "give either --fit FILE"),
        (("--fit", "none.jsonl"), "none.jsonl: no such file"),
        (("--gpu", "H100x"), "known are B200, H200"),
        (("--gpu", "H200", "--model", "none.json"), "cannot read none.json"),
        (("--gpu", "L4", "--model", LLAMA_8B, "--gpu-memory-utilization", "0.5"), "GiB are missing; use more GPUs"),
        (("--gpu", "L4", "--model", LLAMA_8B, "--gpu-memory-utilization", "2"), "--gpu-memory-utilization=2"),
        (("--gpu", "H200", "--arrivals", "none.csv"), "--arrivals: cannot read none.csv"),
        (("--gpu", "H200", "--request-rate", "0"), "--request-rate=0 is not above 0"),
        (("--gpu", "H200", "--prompt-len", "9000"), "request 1 of the workload, 9000 tokens in"),
        (("--gpu", "H200", "--max-num-seqs", "8,x"), "--max-num-seqs='8,x' is not a list of numbers"),
        (("--gpu", "H200", "--max-num-seqs", "70000"), "max_num_seqs='70000' as a flag"),
        (("--gpu", "H200", "--quantization", "int3"), "--quantization='int3' is not known"),
        (("--gpu", "H200", "--num-gpus", "2", "--tensor-parallel-size", "2"), "leave out tensor_parallel_size"),
        ((*GPU, "--max-model-len", "200000"), "max_model_len=200000 is beyond the context length"),
        ((*GPU, "--plot", "/nowhere/plan.png"), "--plot: cannot write /nowhere/plan.png"),
    ],
)
def test_what_cannot_be_planned_is_one_message_and_exit_code_2(octavo, arguments: tuple, message: str) -> None:
    code, _, err = octavo(*arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err


def test_measured_steps_say_nothing_of_other_layouts(octavo, tmp_path: Path) -> None:
    fit = measured(tmp_path / "steps.jsonl")
    code, _, err = octavo("--fit", fit, "--tensor-parallel-size", 2)
    assert (code, "the measured engine has one rank" in err) == (2, True)
    code, _, err = octavo("--fit", fit, "--num-gpus", 2)
    assert (code, "--num-gpus=2 needs --gpu" in err) == (2, True)


def test_a_trace_gives_requests_costs_and_settings(octavo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path / "a.trace", monkeypatch, load(rate=60.0), settings(max_num_seqs=4))
    code, out, _ = octavo("--trace", tmp_path / "a.trace", "--max-num-seqs", "2,4,8", "--json")
    assert code == 0
    few, recorded, many = lines(out)
    assert (few["max_num_seqs"], few["num_requests"]) == (2, 40)
    # What is not given is what was recorded.
    assert recorded["max_num_batched_tokens"] == 64
    assert few["ttft_s_p99"] > recorded["ttft_s_p99"] > many["ttft_s_p99"]
    code, out, _ = octavo("--trace", tmp_path / "a.trace", "--speculative-config", '{"method": "suffix"}', "--json")
    assert code == 0
    assert lines(out)[0]["speculation_ratio"] > 1
    code, _, err = octavo("--trace", tmp_path / "a.trace", "--arrivals", tmp_path / "x.csv")
    assert code == 2
    assert "give one of them" in err
