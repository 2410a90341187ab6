"""Mixtures whose experts are dealt out over ranks give the output of one rank.

Ranks are threads here. Steps of few tokens use a gather, others all-to-all.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from configs.options import Options
from kernels.backend import Backend
from kernels.cpu_backend import cpu_backend
from kernels.shard import ExpertShard, Shard
from protos import step_pb2
from runtime.model_files import resolve_model
from tests.fakes.fake_runner import fake_runner
from tests.support.models.model_runs import ModelRun, relative_error
from tests.support.models.ranks import run_replicas
from worker.cpu.build import build_cpu_runner
from worker.errors import PermanentError
from worker.models.config import config_from_directory
from worker.models.loader import LoadedModel, load_model
from worker.models.registry import model_class
from worker.parallel.axes import Axes
from worker.parallel.groups import Groups

SHAPE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "num_experts_per_tok": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama4ForCausalLM": {
        "num_local_experts": 5,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 64,
        "attention_chunk_size": 32,
        "no_rope_layers": [1, 0],
        "floor_scale": 8,
    },
    "MixtralForCausalLM": {"num_local_experts": 5},
    "Qwen3MoeForCausalLM": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 96},
}
PROMPTS = [
    torch.randint(131, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (21, 140)
]
# Tokens of each step at two replicas: prompts in chunks, then decodes. In some steps one replica has none, in the last
# one neither has any.
STEPS = [(13, 0), (0, 80), (8, 60), (1, 1), (1, 0), (0, 1), (1, 1), (0, 0)]


def _make(directory: Path, architecture: str, **changes: int) -> Path:
    config = {"architectures": [architecture], **SHAPE, **FAMILIES.get(architecture, {}), **changes}
    (directory / "config.json").write_text(json.dumps(config))
    shapes = model_class(architecture).tensor_shapes(config_from_directory(directory))
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) * 0.2 + ("norm" in name) for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def _load(model: Path, backend: Backend) -> LoadedModel:
    return load_model(resolve_model(str(model)), dtype=torch.float32, make_backend=lambda config: backend)


def _path_of(groups: Groups, backend: Backend) -> Backend:
    tensor, experts = groups.tensor, groups.experts
    return replace(backend, shard=Shard(tensor.rank, tensor.size), experts=ExpertShard(experts.rank, experts.size))


def _say(
    loaded: LoadedModel, groups: Groups, steps: Sequence[Sequence[int]], replica: int
) -> tuple[torch.Tensor, list[int]]:
    """Logits of all tokens of a replica, and the greedy tokens after its prompt. steps: tokens of each replica."""
    run, prompt = ModelRun(loaded, groups=groups), PROMPTS[replica]
    row, logits = run.row(prompt, len(prompt) + len(steps)), []
    for counts in steps:
        scheduled = [(row, counts[replica])] if counts[replica] else []
        logits.append(run.step(scheduled, num_tokens_D=counts))
        if scheduled and row.num_computed == len(row.token_ids):
            row.token_ids.append(int(logits[-1][-1].argmax()))
    return torch.cat(logits), row.token_ids[len(prompt) :]


def _alone(model: Path, backend: Backend, replica: int) -> tuple[torch.Tensor, list[int]]:
    run, prompt = ModelRun(_load(model, backend)), PROMPTS[replica]
    row = run.row(prompt, len(prompt) + len(STEPS))
    logits = [run.step([(row, len(prompt))])]
    for _ in range(3):
        row.token_ids.append(int(logits[-1][-1].argmax()))
        logits.append(run.step([(row, 1)]))
    return torch.cat(logits), [*row.token_ids[len(prompt) :], int(logits[-1][-1].argmax())]


@pytest.mark.parametrize(
    ("architecture", "tensor_size"),
    [
        ("Llama4ForCausalLM", 1),
        ("MixtralForCausalLM", 1),
        ("MixtralForCausalLM", 2),
        ("Qwen3MoeForCausalLM", 1),
        ("Qwen3MoeForCausalLM", 2),
    ],
)
def test_two_replicas_in_lockstep_say_what_one_rank_says(tmp_path: Path, architecture: str, tensor_size: int) -> None:
    """Five experts on four ranks: one rank has two. Without tensor parallelism the bits equal those of one rank."""
    model, path = _make(tmp_path, architecture), cpu_backend(torch.float32, SHAPE["head_dim"])

    def say(replica: int, rank: int, groups: Groups) -> tuple[torch.Tensor, list[int]]:
        loaded = _load(model, _path_of(groups, path))
        return _say(loaded, groups, STEPS, replica)

    said = run_replicas(tmp_path, Axes(tensor_size=tensor_size, data_size=2), say)
    for replica, ranks in enumerate(said):
        expected, tokens = _alone(model, path, replica)
        for logits, greedy in ranks:
            assert relative_error(logits, expected) < 1e-4
            assert greedy == tokens
            assert tensor_size > 1 or torch.equal(logits, expected)
            assert torch.equal(logits, ranks[0][0])


def test_a_replica_that_has_nothing_to_do_takes_part_with_an_empty_step(tmp_path: Path) -> None:
    prompt = [5, 6, 7, 8]

    def run(replica: int, rank: int, groups: Groups) -> list[int]:
        runner = fake_runner()
        runner.join(groups)
        new = step_pb2.NewRow(row=0, sequence=1, token_ids=prompt, num_prompt_tokens=len(prompt), block_ids=[1])
        empty = step_pb2.StepPlan()
        plans = [step_pb2.StepPlan(new_rows=[new], rows=[0], num_tokens=[4]), empty], [empty, empty]
        results = [runner.execute(plan) for plan in plans[replica]]
        assert [len(result.token_ids) > 0 for result in results] == [replica == 0, False]
        return [result.num_tokens_of_all for result in results]

    assert run_replicas(tmp_path, Axes(data_size=2), run) == [[[4, 0]], [[4, 0]]]


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("LlamaForCausalLM", {}, "enable_expert_parallel: a LlamaForCausalLM has no experts"),
        ("Llama4ForCausalLM", {"num_experts_per_tok": 2}, "num_experts_per_tok=2 in models .*: only 1 works"),
        ("Qwen3MoeForCausalLM", {"num_experts": 3}, r"3 experts can't be dealt out over 4 ranks .*; 3 ranks or less"),
    ],
)
def test_models_whose_experts_do_not_fit_are_refused(
    tmp_path: Path, architecture: str, changes: dict[str, int], message: str
) -> None:
    model = _make(tmp_path, architecture, **changes)
    options = Options(
        model=str(model),
        load_format="dummy",
        dtype="float32",
        weight_cache=0,
        tensor_parallel_size=4,
        enable_expert_parallel=True,
    )
    with pytest.raises((PermanentError, ValueError), match=message):
        build_cpu_runner(options, rank=1)
