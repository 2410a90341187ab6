"""The tuner's processes: their JSON lines, their crashes, what they time; and the command."""

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from kernels.moe.gemm.tiles import tuned_tile
from kernels.triton_common.tuned_tiles import Tile
from octavo.bench.tune import gpu_process, measure
from octavo.bench.tune.gpu_process import GpuProcess, visible_gpu
from octavo.bench.tune.problem import Device, ExpertsShape, Measurement, Problem, Shape
from octavo.cli.kernels import kernels
from octavo.cli.main import app
from octavo.lab.errors import TuningError
from tests.support.gpu.gpu import DEVICE
from tests.support.repository import ROOT

SHAPE = Shape(N=64, K=256, blockwise=True)
WORKS = Tile(block_m=16, block_n=32, block_k=128, num_stages=4)
DIES = Tile(block_m=16, block_n=32, block_k=128, num_stages=2)
IS_LAST = Tile(block_m=16, block_n=32, block_k=128, num_stages=3)


def command(log: Path, *arguments: str) -> tuple[str, ...]:
    return sys.executable, str(ROOT / "tests/fakes/tune_process.py"), str(log), *arguments


# --- processes


def test_a_process_answers_and_is_started_again_after_its_death(tmp_path: Path) -> None:
    log = tmp_path / "starts"
    process = GpuProcess(0, command(log))
    try:
        measured = [process.measure(4, SHAPE, tile) for tile in (WORKS, DIES, WORKS, IS_LAST, WORKS)]
    finally:
        process.close()
    good = Measurement(microseconds=16)
    assert [tried if tried.error else good for tried in measured] == measured
    assert [tried.error for tried in measured] == ["", "the process ended with status 7", "", "CUDA error", ""]
    assert log.read_text().split() == ["0", "0", "0"]


def test_a_process_that_cannot_start_is_an_error(tmp_path: Path) -> None:
    process = GpuProcess(0, command(tmp_path / "starts", "unable"))
    with pytest.raises(TuningError, match=r"GPU 0: .* ended with status 3 before it measured anything"):
        process.measure(4, SHAPE, WORKS)


def test_each_process_sees_its_own_gpu() -> None:
    assert [visible_gpu(number, {}) for number in (0, 3)] == ["0", "3"]
    assert [visible_gpu(number, {"CUDA_VISIBLE_DEVICES": "5, GPU-8a"}) for number in (0, 1)] == ["5", "GPU-8a"]


# --- measurements


def question(tile: Tile, *, blockwise: bool = True) -> dict[str, object]:
    return {"op": "fp8_gemm", "M": 3, "shape": {"N": 64, "K": 256, "blockwise": blockwise}, "tile": tile.as_json()}


def fake_timer(call: Callable[[], object]) -> float:
    call()
    return 0.25


@pytest.mark.parametrize("blockwise", [True, False])
def test_a_try_is_computed_compared_and_timed(blockwise: bool) -> None:
    reply = measure.answer(question(WORKS, blockwise=blockwise), device=DEVICE, timer=fake_timer)
    assert reply == {"microseconds": 250.0, "error": "", "is_last": False}
    json.dumps(reply)


@pytest.mark.parametrize("is_fp8", [True, False])
def test_experts_are_computed_compared_and_timed(is_fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ExpertsShape(num_experts=3, size=128, hidden_size=256, top_k=2, is_fp8=is_fp8)
    asked = {"op": "moe_gemm", "M": 3, "shape": dataclasses.asdict(shape), "tile": WORKS.as_json()}
    reply = measure.answer(asked, device=DEVICE, timer=fake_timer)
    assert reply == {"microseconds": 250.0, "error": "", "is_last": False}
    right = measure.run_experts
    monkeypatch.setattr(measure, "run_experts", lambda *given, **how: right(*given, **how) * 1.1)
    assert "of the largest output" in measure.answer(asked, device=DEVICE, timer=fake_timer)["error"]


def test_wrong_results_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong results include NaN."""
    right = measure.fp8_gemm
    for wrong in (1.05, float("nan")):
        monkeypatch.setattr(measure, "fp8_gemm", lambda *given, wrong=wrong, **how: right(*given, **how) * wrong)
        reply = measure.answer(question(WORKS), device=DEVICE, timer=fake_timer)
        assert reply["microseconds"] is None
        assert "of the largest output" in reply["error"]


@pytest.mark.parametrize(
    ("failure", "is_last"), [(ValueError("out of resource: shared memory"), False), (RuntimeError("CUDA error"), True)]
)
def test_what_a_tile_does_to_the_gpu_is_its_result(failure: Exception, is_last: bool) -> None:
    def fail(call: Callable[[], object]) -> float:
        raise failure

    reply = measure.answer(question(WORKS), device=DEVICE, timer=fail)
    assert (reply["microseconds"], reply["is_last"]) == (None, is_last)
    assert str(failure) in reply["error"]


# --- the command


def octavo(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["bench", "kernels", *arguments])
    return result.exit_code, " ".join((result.output + str(result.exception or "")).split())


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, text = octavo("--tune", "fp8_gemm", "--shape", "128,128")
    assert code == 1
    assert "--tune measures on GPUs, and torch sees none here" in text


def test_gpus_of_two_kinds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: ("NVIDIA H200", "NVIDIA L40S")[number])
    with pytest.raises(TuningError, match="NVIDIA H200, NVIDIA L40S: set CUDA_VISIBLE_DEVICES to GPUs of one kind"):
        gpu_process.visible_device()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--tune"),
        (("--tune", "moe"), "fp8_gemm"),
        (("--tune", "fp8_gemm"), "--shape"),
        (("--tune", "fp8_gemm", "--shape", "128"), "two numbers above 0"),
        (("--tune", "fp8_gemm", "--shape", "128,0"), "two numbers above 0"),
        (("--tune", "fp8_gemm", "--shape", "128,128", "--scales", "none"), "use block or channel"),
        (("--tune", "moe_gemm", "--shape", "128,128"), "four numbers above 0"),
        (("--tune", "moe_gemm", "--shape", "4,128,256,8"), "a token has 8 of 4 experts"),
        (("--tune", "moe_gemm", "--shape", "4,128,256,2", "--scales", "channel"), "moe_gemm takes block"),
        (("--tune", "fp8_gemm", "--shape", "128,128", "--batch-sizes", "1,x"), "--batch-sizes"),
    ],
)
def test_what_is_missing_or_wrong_is_said(arguments: tuple[str, ...], said: str) -> None:
    code, text = octavo(*arguments)
    assert code == 2
    assert said in text


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Two GPUs whose real processes make up their times. Returns the log of their starts."""
    log = tmp_path / "starts"
    device = Device(name="NVIDIA H200", num_gpus=2, num_sms=132, shared_memory=30 << 10)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpu_process, "visible_device", lambda: device)
    monkeypatch.setattr(gpu_process, "GpuProcess", lambda number: GpuProcess(number, command(log)))
    return log


def test_a_run_prints_lines_of_json_and_writes_the_file(two_gpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tuned"
    where = ("--folder", str(folder), "--batch-sizes", "1,32", "--scales", "channel", "--json")
    result = CliRunner().invoke(app, ["bench", "kernels", "--tune", "fp8_gemm", "--shape", "64,256", *where])
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert sorted(line["M"] for line in lines[:-1]) == [1, 32]
    for line in lines[:-1]:
        assert (line["N"], line["K"], line["scales"], line["microseconds"]) == (64, 256, "channel", 16)
        assert line["tile"]["BLOCK_SIZE_M"] == 16
        # Tiles of two and three stages fail.
        assert 0 < line["num_failed"] < line["num_tried"]
    file = folder / "N=64,K=256,device_name=NVIDIA_H200,dtype=fp8_w8a8.json"
    assert lines[-1] == {"op": "fp8_gemm", "N": 64, "K": 256, "scales": "channel", "file": str(file)}
    assert list(json.loads(file.read_text())) == ["1", "32"]
    assert set(two_gpus.read_text().split()) == {"0", "1"}


def test_batches_of_experts_are_dealt_out_over_gpus(two_gpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tuned"
    where = ("--folder", str(folder), "--batch-sizes", "1,64", "--scales", "none", "--json")
    result = CliRunner().invoke(app, ["bench", "kernels", "--tune", "moe_gemm", "--shape", "8,256,512,2", *where])
    assert result.exit_code == 0, result.output
    *lines, last = [json.loads(line) for line in result.stdout.splitlines()]
    assert sorted(line["M"] for line in lines) == [1, 64]
    sizes = {"op": "moe_gemm", "E": 8, "N": 256, "H": 512, "top_k": 2, "scales": "none"}
    assert all(sizes.items() <= line.items() and 0 < line["num_failed"] < line["num_tried"] for line in lines)
    assert last == sizes | {"file": str(folder / "E=8,N=256,device_name=NVIDIA_H200.json")}
    assert list(json.loads(Path(last["file"]).read_text())) == ["1", "64"]
    assert set(two_gpus.read_text().split()) == {"0", "1"}
    # Kernels read the file.
    tile = tuned_tile(60, 8, 256, "NVIDIA H200", is_fp8=False, folder=folder)
    assert tile is not None
    assert tile.block_m == lines[0]["tile"]["BLOCK_SIZE_M"] == 16


def test_for_people_there_is_a_table(two_gpus: Path, tmp_path: Path) -> None:
    where = ("--folder", str(tmp_path), "--batch-sizes", "1")
    result = CliRunner().invoke(app, ["bench", "kernels", "--tune", "fp8_gemm", "--shape", "64,256", *where])
    assert result.exit_code == 0, result.output
    assert "N=64, K=256" in result.stdout
    assert "TFLOP/s" in result.stdout


def test_an_interrupted_run_says_that_it_goes_on(
    two_gpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(GpuProcess):
        def measure(self, M: int, shape: Problem, tile: Tile) -> Measurement:
            raise KeyboardInterrupt

    monkeypatch.setattr(gpu_process, "GpuProcess", Interrupted)
    code, text = octavo("--tune", "fp8_gemm", "--shape", "64,256", "--folder", str(tmp_path), "--batch-sizes", "1")
    assert code != 0
    assert f"what was measured is kept in {tmp_path}; the same command goes on from there" in text


def test_kernels_is_a_command_of_bench() -> None:
    assert kernels.__doc__ is not None
    assert octavo("--help")[0] == 0
