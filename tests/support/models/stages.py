"""Pipeline stages as threads of one process, connected by gloo over loopback. PyTorch computes, because the C++ kernels
of one process serve only one rank."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kernels.backend import Backend, torch_backend
from kernels.shard import Stage
from protos import inference_pb2, step_pb2
from runtime.model_files import resolve_model
from worker.cpu.executor import CpuExecutor
from worker.cpu.runner import Runner
from worker.cpu.threaded_runner import ThreadedResult, ThreadedRunner
from worker.layers.kv_cache import KVCache
from worker.models.config import config_from_directory
from worker.models.loader import LoadedModel, load_model
from worker.models.registry import model_class
from worker.parallel.axes import Axes
from worker.parallel.group_init import connect_ranks
from worker.parallel.groups import Groups, without_others
from worker.step.rows import Rows
from worker.weights.cache import WeightCache

VOCAB_SIZE = 131
# A prompt with this token has hidden states that are not finite, unless embeddings are tied to the head.
POISON = 130
NUM_LAYERS = 4
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "eos_token_id": 2,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "Gemma3ForCausalLM": {"sliding_window": 9, "sliding_window_pattern": 3},
    "LlamaForCausalLM": {"tie_word_embeddings": True},
    "Qwen2ForCausalLM": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "Qwen3MoeForCausalLM": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
}


def make_model(directory: Path, architecture: str) -> Path:
    (directory / "config.json").write_text(
        json.dumps({"architectures": [architecture], **_SHAPE, **_FAMILIES[architecture]})
    )
    config = config_from_directory(directory)
    generator = torch.Generator().manual_seed(0)
    shapes = model_class(architecture).tensor_shapes(config)
    tensors = {name: torch.randn(shape, generator=generator) * 0.2 + ("norm" in name) for name, shape in shapes.items()}
    if not config.tie_word_embeddings:  # otherwise all logits would have a NaN
        tensors["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def load_stage(
    model: Path, stage: Stage, backend: Backend | None = None, cache: WeightCache | None = None
) -> LoadedModel:
    """Loads one stage. backend: None for PyTorch's."""
    staged = replace(backend or torch_backend(torch.float32), stage=stage)
    return load_model(resolve_model(str(model)), dtype=torch.float32, make_backend=lambda config: staged, cache=cache)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    num_blocks: int = 64
    num_swap_blocks: int = 0
    max_num_batched_tokens: int = 64
    max_num_seqs: int = 8
    max_steps_in_flight: int = 1


def make_runner(model: Path, stage: Stage, sizes: Sizes, *, block_size: int = 8) -> Runner:
    loaded = load_stage(model, stage)
    config, max_model_len = loaded.config, 128
    rows = Rows(
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=sizes.num_blocks,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=config.eos_token_ids,
    )
    info = inference_pb2.ModelInfo(
        name="stages",
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        block_size=block_size,
        num_blocks=sizes.num_blocks,
        eos_token_ids=sorted(config.eos_token_ids),
    )
    cache = KVCache(config, num_blocks=sizes.num_blocks + 1, block_size=block_size, backend=loaded.model.backend)
    runner = Runner(
        CpuExecutor(loaded.model),
        cache,
        rows,
        info,
        num_swap_blocks=sizes.num_swap_blocks,
        without_others=without_others(Axes(pipeline_size=stage.size), stage.index),
        max_steps_in_flight=sizes.max_steps_in_flight,
    )
    runner.warm_up()
    return runner


def meet_all(directory: Path, num_stages: int) -> list[Groups]:
    """Connected groups of each stage. directory: must not have been used for this before."""
    address, axes = f"file:{directory / 'rendezvous'}", Axes(pipeline_size=num_stages)

    def of_stage(stage: int) -> Groups:
        return connect_ranks(address, axes, stage, call_timeout=60, while_waiting=lambda: None)

    with ThreadPoolExecutor(num_stages) as threads:
        return list(threads.map(of_stage, range(num_stages)))


class StagesResult:
    """A worker.step.runner.PendingResult: the result of the last stage."""

    def __init__(self, results: Sequence[ThreadedResult]) -> None:
        self._results = results

    @property
    def is_done(self) -> bool:
        return all(result.is_done for result in self._results)

    def result(self) -> step_pb2.StepResult:
        *others, last = [result.result() for result in self._results]
        assert not any(each.sequences or each.failed_sequences for each in others), "an earlier stage has results"
        return last

    def call_when_done(self, callback: Callable[[], None]) -> None:
        raise NotImplementedError


class Stages:
    """A worker.step.runner.StepRunner: all stages of a replica, connected."""

    holds_constrained = False

    def __init__(self, runners: Sequence[Runner], directory: Path, *, max_steps_in_flight: int) -> None:
        self.stages = [ThreadedRunner(runner, max_steps_in_flight=max_steps_in_flight) for runner in runners]
        self.groups = meet_all(directory, len(runners))
        for stage, groups in zip(self.stages, self.groups, strict=True):
            stage.join(groups)
        self.model_info, self.num_swap_blocks = runners[0].model_info, runners[0].num_swap_blocks
        self.drafter, self.items = runners[-1].drafter, runners[0].items

    @property
    def num_live_rows(self) -> int:
        return self.stages[-1].num_live_rows

    def begin(self, plan: step_pb2.StepPlan) -> StagesResult:
        # The last stage begins first, so that it has to wait for the others.
        return StagesResult([stage.begin(plan) for stage in reversed(self.stages)][::-1])

    def execute(self, plan: step_pb2.StepPlan) -> step_pb2.StepResult:
        return self.begin(plan).result()

    def reset(self) -> None:
        for stage in self.stages:
            stage.reset()

    def join(self, groups: Groups | None, while_waiting: Callable[[], None] = lambda: None) -> None:
        for stage in self.stages:
            stage.join(groups)
