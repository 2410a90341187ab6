"""Models whose layers are cut over several ranks give the logits and tokens of one rank.

Ranks are threads here, and PyTorch computes: the C++ kernels of a process serve a single rank.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kernels.backend import torch_backend
from kernels.shard import Shard
from runtime.model_files import resolve_model
from tests.support.models.model_runs import ModelRun, relative_error
from tests.support.models.ranks import run_ranks
from worker.models.config import config_from_directory
from worker.models.loader import load_model
from worker.models.registry import model_class
from worker.parallel.gloo import GlooGroup
from worker.parallel.groups import Groups
from worker.weights.quantization.kinds import QuantizationOption

SHAPE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "DeepseekV3ForCausalLM": {
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 24,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "n_shared_experts": 1,
        "n_group": 3,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    "Gemma3ForCausalLM": {"sliding_window": 9, "sliding_window_pattern": 2},
    "Llama4ForCausalLM": {
        "intermediate_size_mlp": 96,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_layers": [1],
        "no_rope_layers": [1, 0],
        "attention_chunk_size": 9,
        "floor_scale": 4,
    },
    "LlamaForCausalLM": {
        "num_key_value_heads": 2,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "Qwen2ForCausalLM": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "Qwen3MoeForCausalLM": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
}


def _make(directory: Path, architecture: str, **changes: int) -> Path:
    (directory / "config.json").write_text(
        json.dumps({"architectures": [architecture], **SHAPE, **FAMILIES[architecture], **changes})
    )
    config = config_from_directory(directory)
    generator = torch.Generator().manual_seed(0)
    shapes = model_class(architecture).tensor_shapes(config)
    tensors = {name: torch.randn(shape, generator=generator) * 0.2 + ("norm" in name) for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def _run(
    model: Path, shard: Shard, group: GlooGroup | None, quantization: QuantizationOption
) -> tuple[torch.Tensor, list[int]]:
    """Logits of a prompt in chunks, and the greedy tokens after it."""
    backend = replace(torch_backend(torch.float32), shard=shard)
    loaded = load_model(
        resolve_model(str(model)), dtype=torch.float32, quantization=quantization, make_backend=lambda config: backend
    )
    run = ModelRun(loaded, groups=Groups() if group is None else Groups(tensor=group))
    prompt = torch.randint(131, (21,), generator=torch.Generator().manual_seed(1)).tolist()
    row = run.row(prompt, 40)
    logits = torch.cat([run.step([(row, 13)]), run.step([(row, 8)])])
    tokens = [int(logits[-1].argmax())]
    for _ in range(4):
        row.token_ids.append(tokens[-1])
        said, _ = run.greedy_step([(row, 1)])
        tokens.append(int(said[0]))
    return logits, tokens


@pytest.mark.parametrize(
    ("architecture", "size", "quantization"),
    [
        ("DeepseekV3ForCausalLM", 2, "none"),
        ("Gemma3ForCausalLM", 3, "none"),
        ("Llama4ForCausalLM", 3, "none"),
        ("LlamaForCausalLM", 2, "none"),
        ("LlamaForCausalLM", 6, "none"),
        ("Qwen2ForCausalLM", 3, "none"),
        ("Qwen3MoeForCausalLM", 3, "none"),
        ("LlamaForCausalLM", 2, "int8"),
        ("LlamaForCausalLM", 2, "int4"),
    ],
)
def test_ranks_say_what_one_says(
    tmp_path: Path, architecture: str, size: int, quantization: QuantizationOption
) -> None:
    """Two KV heads on 6 ranks: three ranks hold each. Ranks add sums in another order than one rank."""
    model = _make(tmp_path, architecture)
    expected, tokens = _run(model, Shard(), None, quantization)
    ranks = run_ranks(tmp_path, size, lambda group: _run(model, Shard(group.rank, size), group, quantization))
    for logits, said in ranks:
        assert relative_error(logits, expected) < 1e-4
        assert said == tokens
        assert torch.equal(logits, ranks[0][0])


@pytest.mark.parametrize(
    ("size", "quantization", "message"),
    [
        (3, "none", "tensor_parallel_size=3 does not fit 6 heads on 2 KV heads; 1, 2, 6 do"),
        (6, "int4", "would cut groups of 32"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_those_that_do(
    tmp_path: Path, size: int, quantization: QuantizationOption, message: str
) -> None:
    model = _make(tmp_path, "LlamaForCausalLM", intermediate_size=288)
    backend = replace(torch_backend(torch.float32), shard=Shard(0, size))
    with pytest.raises(ValueError, match=message):
        load_model(
            resolve_model(str(model)),
            dtype=torch.float32,
            quantization=quantization,
            make_backend=lambda config: backend,
        )


def test_what_a_decode_step_sends_is_what_the_docs_say(tmp_path: Path) -> None:
    """docs/architecture.md: 2 L + 1 sums of T x E float32, and 16 bytes a token for the likeliest token."""
    model, size, num_rows = _make(tmp_path, "LlamaForCausalLM"), 2, 3

    def calls_and_bytes(group: GlooGroup) -> tuple[int, int]:
        backend = replace(torch_backend(torch.float32), shard=Shard(group.rank, size))
        loaded = load_model(resolve_model(str(model)), dtype=torch.float32, make_backend=lambda config: backend)
        run = ModelRun(loaded, groups=Groups(tensor=group))
        rows = [run.row([7, 8, 9], 3) for _ in range(num_rows)]
        run.step([(row, 2) for row in rows])
        before = group.num_calls, group.num_bytes
        run.greedy_step([(row, 1) for row in rows])
        return group.num_calls - before[0], group.num_bytes - before[1]

    num_sums = 2 * SHAPE["num_hidden_layers"] + 1
    num_bytes = (size - 1) * (num_sums * num_rows * SHAPE["hidden_size"] * 4 + 16 * num_rows)
    assert run_ranks(tmp_path, size, calls_and_bytes) == [(num_sums + 1, num_bytes)] * size
