"""Building a worker on a GPU with limited memory: with the lower options that an error suggests, it fits.

Weights are really loaded; engine, KV cache and graphs are stand-ins that take memory.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from configs.load import load_options
from configs.options import Options
from protos import inference_pb2, step_pb2
from runtime.model_files import resolve_model
from tests.fakes.gpu.gpu_engine import HeldEvent
from tests.fakes.gpu.simulated_gpu import SimulatedGpu, Taken
from worker.errors import PermanentError, StepError
from worker.gpu import build as build_module
from worker.gpu import components as parts_module
from worker.gpu.build import build_gpu_runner, weight_bytes
from worker.gpu.graphs import GraphSizes
from worker.gpu.runner import GpuRunner
from worker.layers.kv_cache import KVCache
from worker.models.loader import config_of
from worker.step.inputs import StepInputs, StepOutputs

MIB = 2**20
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": 2,
}
# Bytes of one layer's keys and values for 16 tokens, in bfloat16.
BLOCK = 2 * 16 * 64 * 2


@dataclass
class Needs:
    """Memory that a model takes, in bytes."""

    weights: int = 100 * MIB
    # For each token and each row of a step: half of it for the engine's lifetime, half while a step computes.
    token: int = 16 * 2**10
    row: int = 2**18
    graphs: int = 10 * MIB
    # What graphs take beyond the estimate.
    more_graphs: int = 0
    # What other processes take between the profile and the KV cache.
    intruder: int = 0
    # (rows, tokens) of the computed steps.
    steps: list[tuple[int, int]] = field(default_factory=list)


class DoneStep:
    is_done = True

    def __init__(self, num_rows: int) -> None:
        self.event, self._num_rows = HeldEvent(), num_rows
        self.event.reach()

    def wait(self) -> StepOutputs:
        ones_N = np.ones(self._num_rows, np.int32)
        return StepOutputs(tokens_ND1=ones_N[:, None], counts_N=ones_N)


def simulate(monkeypatch: pytest.MonkeyPatch, gpu: SimulatedGpu, needs: Needs) -> None:
    """Makes everything that takes memory take it from the simulated GPU."""

    class Engine:
        def __init__(self, model: Any, kv_cache: Any, device: Any, **sizes: int) -> None:
            self._half = (sizes["max_num_batched_tokens"] * needs.token + sizes["max_num_seqs"] * needs.row) // 2
            self._kept = gpu.take(self._half)
            self.graphs: Any = None

        def begin(self, inputs: StepInputs) -> DoneStep:
            needs.steps.append((len(inputs.rows_S), len(inputs.token_ids_T)))
            passing = gpu.take(self._half)
            assert passing is not None
            return DoneStep(len(inputs.sampling_N))

        def reset(self) -> None: ...

    class Cache(KVCache):
        def __init__(self, config: Any, *, num_blocks: int, block_size: int, backend: Any) -> None:
            if num_blocks > 2:
                gpu.others += needs.intruder
            # One layer after the other, as tensors would.
            self.taken = [gpu.take(num_blocks * BLOCK // 4) for _ in range(4)]
            super().__init__(config, num_blocks=2, block_size=block_size, backend=backend)

    class Graphs:
        def __init__(self, *parts: Any) -> None: ...

        def capture(self) -> None:
            self.taken = gpu.take(needs.graphs + needs.more_graphs)

    load, weights = build_module.load_model, list[Taken]()

    def load_model(*arguments: Any, **options: Any) -> Any:
        weights.append(gpu.take(needs.weights))
        return load(*arguments, **options)

    def estimate(engine: Any, model: Any, kv_cache: Any, device: Any, sizes: GraphSizes) -> int:
        return needs.graphs if sizes.decodes else 0

    monkeypatch.setattr(build_module, "load_model", load_model)
    for name, stand_in in {
        "GpuEngine": Engine,
        "KVCache": Cache,
        "CapturedGraphs": Graphs,
        "graph_memory_estimate": estimate,
    }.items():
        monkeypatch.setattr(parts_module, name, stand_in)


Build = Callable[..., GpuRunner]


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    def build(
        gpu: SimulatedGpu, needs: Needs, progress: Callable[[float], None] = lambda fraction: None, **changes: Any
    ) -> GpuRunner:
        (tmp_path / "config.json").write_text(json.dumps(TINY))
        with monkeypatch.context() as patched:
            simulate(patched, gpu, needs)
            return build_gpu_runner(options_of(tmp_path, **changes), gpu, progress)

    return build


def options_of(model: Path, **changes: Any) -> Options:
    flags = {"model": str(model), "load_format": "dummy", "max_num_seqs": 8, "max_num_batched_tokens": 1024, **changes}
    return load_options(flags=flags, environ={})


def number(name: str, error: pytest.ExceptionInfo[Exception]) -> float:
    """The value that an error suggests for an option."""
    found = re.findall(rf"{name}=([\d.]+\d)", str(error.value))
    assert found, error.value
    return float(found[-1])


def test_what_is_left_is_the_kv_cache(build: Build, caplog: pytest.LogCaptureFixture):
    gpu, needs = SimulatedGpu(total=200 * MIB, others=5 * MIB), Needs()
    with caplog.at_level("INFO", "octavo.worker"):
        runner = build(gpu, needs)
    step = 1024 * needs.token + 8 * needs.row
    left = 180 * MIB - (5 + 100 + 10) * MIB - step
    assert runner.model_info.num_blocks == left // BLOCK - 1
    assert gpu.memory().free >= 20 * MIB, "the worker took memory that gpu_memory_utilization leaves to others"
    # An eighth of the largest step, the largest step, then the first steps through the runner.
    assert needs.steps[:2] == [(1, 128), (8, 1024)]
    assert f"KV cache 0.05 ({left // BLOCK - 1} blocks" in caplog.text


def test_compiling_is_reported_before_the_first_step_and_may_be_left(build: Build):
    """`progress` is where a worker learns that it must stop."""

    class Stopped(Exception):
        pass

    needs, said = Needs(), list[float]()

    def progress(fraction: float) -> None:
        said.append(fraction)
        if needs.steps:
            raise Stopped

    with pytest.raises(Stopped):
        build(SimulatedGpu(total=200 * MIB), needs, progress)
    assert said[-2:] == [1.0, 1.0]
    assert len(needs.steps) == 2, "more than the profile was computed"


def test_a_number_of_blocks_is_taken_as_it_is(build: Build):
    needs = Needs()
    runner = build(SimulatedGpu(total=200 * MIB), needs, num_blocks_override=300)
    assert (runner.model_info.num_blocks, runner.model_info.max_model_len) == (300, 4096)
    assert (8, 1024) not in needs.steps, "a step was measured without need"


def test_weights_that_do_not_fit_are_told_with_what_fp8_needs(build: Build):
    with pytest.raises(PermanentError, match="out of GPU memory while loading the weights: ") as error:
        build(SimulatedGpu(total=90 * MIB), Needs())
    assert isinstance(error.value.__cause__, torch.OutOfMemoryError)
    assert "quantization=fp8" in str(error.value)


def test_weights_that_are_fp8_already_are_not_told_to_become_it(build: Build, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(TINY, "quantization_config", {"quant_method": "fp8", "weight_block_size": [128, 128]})
    with pytest.raises(PermanentError, match="out of GPU memory while loading the weights") as error:
        build(SimulatedGpu(total=90 * MIB), Needs())
    assert "quantization=fp8" not in str(error.value)


def test_what_weights_need_is_known_from_their_shapes(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    config, made_for = config_of(resolve_model(str(tmp_path)))
    assert made_for == "none"
    embeddings, norms, rows = 2 * 96 * 64, 3 * 64, (64 + 2 * 64) + 64 + 2 * 64 + 64
    assert weight_bytes(config, torch.bfloat16) == 2 * (embeddings + norms + rows * 64)
    # Half a byte per weight, and 4 bytes for each 32 inputs.
    packed = weight_bytes(config, torch.bfloat16, "int4")
    assert packed == 2 * (embeddings + norms) + rows * (32 + 2 * 4)
    # One byte per weight, and a float32 scale per output.
    assert weight_bytes(config, torch.bfloat16, "fp8") == 2 * (embeddings + norms) + rows * (64 + 4)


def test_a_step_that_does_not_fit_fits_with_the_tokens_named(build: Build):
    total, options = 300 * MIB, {"max_num_batched_tokens": 16384}
    with pytest.raises(PermanentError, match="out of GPU memory in a step of max_num_batched_tokens=16384") as error:
        build(SimulatedGpu(total=total), Needs(), **options)
    tokens = number("max_num_batched_tokens", error)
    assert 4096 < tokens < 16384
    assert build(SimulatedGpu(total=total), Needs(), max_num_batched_tokens=int(tokens)) is not None


def test_even_an_eighth_of_a_step_may_not_fit(build: Build):
    with pytest.raises(PermanentError, match="out of GPU memory in a step") as error:
        build(SimulatedGpu(total=150 * MIB), Needs(), max_num_batched_tokens=65536)
    assert number("max_num_batched_tokens", error) < 65536 // 8


def test_no_room_for_kv_is_room_with_the_options_named(build: Build):
    total, needs = 120 * MIB, Needs(token=1024)
    with pytest.raises(PermanentError, match=r"which leaves 0\.00 GiB for the KV cache") as error:
        build(SimulatedGpu(total=total), needs, max_num_batched_tokens=2048)
    share = number("gpu_memory_utilization", error)
    runner = build(SimulatedGpu(total=total), needs, max_num_batched_tokens=2048, gpu_memory_utilization=share)
    assert runner.model_info.num_blocks * 16 >= 4096
    assert build(SimulatedGpu(total=total), needs, max_num_batched_tokens=2048, enforce_eager=True) is not None


def test_a_cache_that_others_left_no_room_for_fits_with_the_share_named(build: Build):
    needs = Needs(intruder=60 * MIB)
    with pytest.raises(PermanentError, match=r"memory: the KV cache needs .* less than a moment ago") as error:
        build(SimulatedGpu(total=200 * MIB), needs)
    share = number("gpu_memory_utilization", error)
    assert build(SimulatedGpu(total=200 * MIB), needs, gpu_memory_utilization=share) is not None


def test_what_others_take_later_is_told_as_theirs(build: Build):
    """The cache fits, but the engine built after it does not."""
    needs = Needs(intruder=40 * MIB)
    with pytest.raises(PermanentError, match=r"processes 0\.04 \(0\.00 when memory was measured\)") as error:
        build(SimulatedGpu(total=200 * MIB), needs)
    share = number("gpu_memory_utilization", error)
    assert build(SimulatedGpu(total=200 * MIB), needs, gpu_memory_utilization=share) is not None


def test_more_blocks_than_there_is_memory_are_told_how_many_fit(build: Build):
    with pytest.raises(PermanentError, match="num_blocks_override=90000: use") as error:
        build(SimulatedGpu(total=200 * MIB), Needs(), num_blocks_override=90_000)
    fitting = int(re.findall(r"use (\d+) or less", str(error.value))[0])
    assert 20_000 < fitting < 90_000


def test_graphs_that_do_not_fit_are_told_how_to_do_without(build: Build):
    needs = Needs(more_graphs=50 * MIB)
    with pytest.raises(PermanentError, match=r"while CUDA graphs of .* were captured.*or enforce_eager=true"):
        build(SimulatedGpu(total=200 * MIB), needs)


def test_a_step_without_memory_ends_the_epoch_and_says_to_share_less(build: Build):
    gpu = SimulatedGpu(total=200 * MIB)
    runner = build(gpu, Needs())
    sampling = inference_pb2.SamplingParams(temperature=0.0)
    row = step_pb2.NewRow(sequence=1, token_ids=[5, 6], num_prompt_tokens=2, block_ids=[1], sampling=sampling)
    plan = step_pb2.StepPlan(new_rows=[row], rows=[0], num_tokens=[2])
    gpu.others = gpu.memory().free
    with pytest.raises(StepError, match="start with gpu_memory_utilization=") as error:
        runner.begin(plan)
    assert number("gpu_memory_utilization", error) < 0.85
    # The other processes are gone: the next epoch computes.
    gpu.others = 0
    runner.reset()
    assert runner.begin(plan).result().step == 0


def test_heads_that_no_kernel_computes_are_named(build: Build, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(TINY, "head_dim", 40)
    with pytest.raises(PermanentError, match=r"head size is 40, .* supports 64, 80, 96, 128, 192, 256; device=cpu"):
        build(SimulatedGpu(total=200 * MIB), Needs())


def test_latents_that_no_kernel_computes_are_named(build: Build, monkeypatch: pytest.MonkeyPatch):
    changes: dict[str, Any] = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "q_lora_rank": None,
        "kv_lora_rank": 96,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 8,
        "n_group": 1,
        "topk_group": 1,
    }
    for name, value in changes.items():
        monkeypatch.setitem(TINY, name, value)
    with pytest.raises(PermanentError, match="latent size 96: powers of two from 64 on work; device=cpu"):
        build(SimulatedGpu(total=200 * MIB), Needs())
