"""benchmarks/gpu without a GPU: its imports, its schedules and its reports. `python -m benchmarks.gpu.run_all --toy`
tests the parts that run kernels."""

import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from benchmarks.gpu.end_to_end import OP, TOY_LIMITS, TOY_SIZES, checks, measure_variant, reference
from benchmarks.gpu.end_to_end.schedule import Request, Schedule, num_blocks_of
from benchmarks.gpu.end_to_end.shapes import TOY_VARIANTS, VARIANTS
from benchmarks.gpu.report import Report
from benchmarks.gpu.targets import targets
from tests.fakes.gpu.recording_device import RecordingDevice
from tests.support.gpu.gpu import DEVICE
from tests.support.repository import ROOT
from worker.step.inputs import LAST_SAMPLED, StepInputs, StepOutputs

# Packages that GPU machines may lack. The benchmarks must run there without installing anything.
MISSING = (
    "pydantic",
    "msgspec",
    "zmq",
    "gguf",
    "protos",
    "google",
    "grpc",
    "transformers",
    "tokenizers",
    "safetensors",
    "yaml",
    "psutil",
    "prometheus_client",
)
IMPORTS_ALL = f"""
import importlib, pkgutil, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {MISSING}:
            raise ImportError(f"{{name}} is missing here")

sys.meta_path.insert(0, Missing())
import benchmarks.gpu
for module in pkgutil.walk_packages(benchmarks.gpu.__path__, "benchmarks.gpu."):
    importlib.import_module(module.name)
"""

needs_interpreter = pytest.mark.skipif(DEVICE != "cpu", reason="with a GPU, run_all itself runs")


def report(seconds: float = 3600.0) -> Report:
    return Report(toy=True, device="cpu", deadline=time.monotonic() + seconds)


def test_all_benchmarks_import_without_packages_that_gpu_machines_lack() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS_ALL], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@needs_interpreter
def test_whole_models_are_checked_in_every_way_before_they_are_measured() -> None:
    run, variant = report(), TOY_VARIANTS[0]
    sizes = replace(TOY_SIZES, step_tokens=(), num_requests=1, lengths=(2, 2))
    measure_variant(run, variant, RecordingDevice(memory_bytes=64 << 30), sizes, TOY_LIMITS)
    assert not run.failed
    assert not [row for row in run.rows if "skipped" in row]
    is_check = ["checked" in row for row in run.rows]
    assert is_check == sorted(is_check, reverse=True), "checks come first"
    ways = {"graphs, overlap", "eager, overlap", "graphs", "eager"}
    for begin in (f"{variant.name}, decode", f"{variant.name}, 1 x 2-2"):
        assert {row["way"] for row in run.rows if row["case"].startswith(begin) and "way" in row} == ways


@needs_interpreter
def test_logits_that_are_not_right_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound, wide enough for e4m3 weights and KV, must still detect a rope that turns too far."""
    arguments = report(), OP, TOY_VARIANTS[-1], torch.device("cpu"), (5, 3)
    turned = reference._turned
    with torch.inference_mode():
        checks.check_logits(*arguments)
    monkeypatch.setattr(reference, "_turned", lambda x_THD, angles_TD: turned(x_THD, angles_TD * 1.5))
    with torch.inference_mode(), pytest.raises(AssertionError):
        checks.check_logits(*arguments)


def simulate(requests: list[Request], *, budget: int, num_in_flight: int) -> tuple[Schedule, list[StepInputs]]:
    """Runs a schedule to its end; each row samples 1000 * row + position."""
    schedule = Schedule(
        requests, block_size=4, num_blocks=num_blocks_of(requests, 4) + 3, max_num_batched_tokens=budget
    )
    steps: list[StepInputs] = []
    taken = 0
    while not schedule.is_done or taken < len(steps):
        if schedule.is_done or len(steps) - taken == num_in_flight:
            inputs = steps[taken]
            tokens = 1000 * inputs.rows_S[inputs.sampling_N] + inputs.output_positions_N
            schedule.take(inputs, StepOutputs(tokens_ND1=tokens[:, None], counts_N=np.ones(len(tokens), np.int32)))
            taken += 1
        else:
            steps.append(schedule.next())
    return schedule, steps


@pytest.mark.parametrize("num_in_flight", [1, 2])
def test_steps_compute_each_token_once_within_the_budget(num_in_flight: int) -> None:
    requests = [Request(np.arange(length, dtype=np.int32), outputs) for length, outputs in ((9, 3), (1, 1), (14, 6))]
    schedule, steps = simulate(requests, budget=8, num_in_flight=num_in_flight)
    computed: list[list[int]] = [[], [], []]
    for step in steps:
        assert 0 < len(step.token_ids_T) <= 8
        for row, (first, end), context in zip(
            step.rows_S, pairwise(step.query_starts), step.context_lens_S, strict=True
        ):
            computed[row] += step.token_ids_T[first:end].tolist()
            assert len(computed[row]) == context
    for row, request in enumerate(requests):
        assert computed[row] == request.prompt.tolist() + [LAST_SAMPLED] * (request.num_outputs - 1)
        assert schedule.tokens_RO[row, : request.num_outputs].tolist() == [
            1000 * row + position for position in range(request.num_outputs)
        ]
    blocks = np.concatenate([step.table_changes.block_ids_C for step in steps if step.table_changes is not None])
    assert len(set(blocks.tolist())) == len(blocks) == num_blocks_of(requests, 4) - 1
    assert 0 not in blocks
    assert [new.row for step in steps for new in step.new_rows] == [0, 1, 2]


def test_a_token_that_is_none_is_an_error() -> None:
    requests = [Request(np.zeros(2, np.int32), 1)]
    schedule = Schedule(requests, block_size=4, num_blocks=2, max_num_batched_tokens=4)
    outputs = StepOutputs(tokens_ND1=np.full((1, 1), -1, np.int32), counts_N=np.ones(1, np.int32))
    with pytest.raises(ValueError, match="not finite"):
        schedule.take(schedule.next(), outputs)


def test_a_part_that_fails_leaves_the_rows_of_others() -> None:
    run = report()
    run.row("a", "case", "way", 1.0)

    def fail() -> None:
        raise ValueError("as it happens")

    assert not run.attempt("b", "its case", fail)
    assert run.attempt("c", "", lambda: run.row("c", "case", "way", 2.0))
    assert run.failed == ["b its case"]
    assert [row["op"] for row in run.rows] == ["a", "b", "c"]
    assert "ValueError: as it happens" in run.table()


def test_a_part_cannot_take_the_time_of_others() -> None:
    run = report(seconds=1000.0)
    with run.within(0.1):
        assert run.has_time(90.0)
        assert not run.has_time(200.0)
    assert run.has_time(900.0)


def gemm(m: int, over_bf16: float, tflops: float = 1000.0) -> dict:
    return {
        "op": "fp8_gemm",
        "case": f"x 1x1, M={m}",
        "way": "block triton",
        "ms": 1.0,
        "tflops": tflops,
        "over_bf16": over_bf16,
        "chosen": 1.0,
    }


def decode(way: str, ms: float, idle_share: float = 0.01) -> dict:
    case = f"{VARIANTS[0].name}, decode, 1 x 512"
    return {"op": OP, "case": case, "way": way, "ms": ms, "idle_share": idle_share}


def attention(case: str, way: str = "ours", **figures: float) -> dict:
    return {"op": "paged_attention", "case": case, "way": way, "ms": 1.0, **figures}


def test_targets_are_read_from_rows() -> None:
    rows = [
        attention("decode, 8 x 65536", share_of_copy=0.8, kv_gb=2.1),
        attention("decode, 1 x 1024", share_of_copy=0.1, kv_gb=0.004),
        attention("decode, 8 x 65536", "SDPA, contiguous", share_of_copy=0.2, kv_gb=2.1),
        attention("prefill, 1 x 16384", tflops=390.0),
        *(gemm(m, over) for m, over in ((1, 0.9), (16, 1.1), (4096, 1.5))),
        {**gemm(4096, 0.5, tflops=10.0), "chosen": 0.0},
        *(decode(way, ms) for way, ms in (("eager, overlap", 6.0), ("graphs, overlap", 2.0), ("eager", 9.0))),
        decode("graphs", 2.5, idle_share=0.3),
    ]
    share, prefill, tflops, ahead, over_eager, idle = targets(rows)
    assert (share.got, share.is_met) == ("0.8", True)
    assert (prefill.got, prefill.is_met) == ("390", False)
    assert (tflops.got, tflops.is_met) == ("1e+03", True)
    assert (ahead.got, ahead.is_met) == ("16 (of 1, 16, 4096)", True)
    assert (over_eager.got, over_eager.is_met) == ("3 to 3.6 (2 cases)", True)
    assert (idle.got, idle.is_met) == ("0.01", True)
    assert [target.is_met for target in targets([])] == [None] * 6
