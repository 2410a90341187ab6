"""GGUF files with the names, orders and metadata of llama.cpp's converter (ggml-org/llama.cpp) give what safetensors
give."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file

from runtime.model_files import resolve_model
from tests.support.models.gguf_files import write_gguf
from tests.support.models.model_runs import ModelRun, relative_error
from worker.models.config import config_from_directory
from worker.models.gguf_source import GGUFSource
from worker.models.loader import load_model
from worker.models.registry import model_class
from worker.weights.reader import WeightsError

SHAPE: dict[str, Any] = {
    "vocab_size": 80,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
_WINDOWS = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 2}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_EXPERT_METADATA = {"expert_count": 5, "expert_used_count": 2, "expert_feed_forward_length": 24}
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma2": (
        "Gemma2ForCausalLM",
        {
            **_WINDOWS,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
        },
        {"attention.sliding_window": 9, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    ),
    "granite": (
        "GraniteForCausalLM",
        {"embedding_multiplier": 12.0, "attention_multiplier": 0.3, "residual_multiplier": 0.4, "logits_scaling": 4.0},
        {"embedding_scale": 12.0, "attention.scale": 0.3, "residual_scale": 0.4, "logit_scale": 4.0},
    ),
    "olmo2": ("Olmo2ForCausalLM", {}, {}),
    "olmo3": (
        "Olmo3ForCausalLM",
        {**_WINDOWS, "rope_scaling": _YARN},
        {
            "attention.sliding_window": 9,
            "attention.sliding_window_pattern": [True, False] * 2,
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32,
        },
    ),
    "smollm3": ("SmolLM3ForCausalLM", {}, {}),
    "phi3": ("Phi3ForCausalLM", {"sliding_window": 9}, {"attention.sliding_window": 9}),
    "glm4": (
        "Glm4ForCausalLM",
        {"partial_rotary_factor": 0.5, "attention_bias": True},
        {"rope.dimension_count": 8},
    ),
    "llama": (
        "MixtralForCausalLM",
        {"num_local_experts": 5, "num_experts_per_tok": 2},
        {"expert_count": 5, "expert_used_count": 2},
    ),
    "qwen2moe": (
        "Qwen2MoeForCausalLM",
        {**_EXPERTS, "norm_topk_prob": False, "shared_expert_intermediate_size": 32},
        {**_EXPERT_METADATA, "expert_shared_feed_forward_length": 32},
    ),
    "qwen3moe": ("Qwen3MoeForCausalLM", {**_EXPERTS, "norm_topk_prob": True}, _EXPERT_METADATA),
    "gpt-oss": (
        "GptOssForCausalLM",
        {
            **_WINDOWS,
            "num_local_experts": 5,
            "experts_per_token": 3,
            "rope_scaling": {**_YARN, "truncate": False},
        },
        {
            "expert_count": 5,
            "expert_used_count": 3,
            "expert_feed_forward_length": 96,
            "attention.sliding_window": 9,
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32,
        },
    ),
}


def write_model(directory: Path, architecture: str, fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    (directory / "config.json").write_text(json.dumps({**SHAPE, **fields, "architectures": [architecture]}))
    generator = torch.Generator().manual_seed(0)
    shapes = model_class(architecture).tensor_shapes(config_from_directory(directory))
    tensors = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return tensors


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gguf_file_gives_what_safetensors_give(family: str, tmp_path: Path) -> None:
    architecture, fields, metadata = FAMILIES[family]
    write_model(tmp_path, architecture, fields)
    arch = "olmo2" if family == "olmo3" else family
    scaling = "yarn" if "rope_scaling" in fields else None
    file = write_gguf(
        tmp_path / "model.gguf",
        tmp_path,
        Kind.F32,
        arch=arch,
        metadata=metadata,
        rope_scaling=scaling,
        pairs_neighbours=True if family == "llama" else None,
    )
    logits = []
    for path in (tmp_path, file):
        run = ModelRun(load_model(resolve_model(str(path)), dtype=torch.float32))
        row = run.row(range(30), 30)
        logits.append(torch.cat([run.step([(row, 20)]), run.step([(row, 1)]), run.step([(row, 9)])]))
    assert relative_error(logits[1], logits[0]) < 1e-5


def test_experts_in_mxfp4_are_read_one_by_one(tmp_path: Path) -> None:
    architecture, fields, metadata = FAMILIES["gpt-oss"]
    tensors = write_model(tmp_path, architecture, fields)
    prefix = "model.layers.1.mlp.experts"
    file = write_gguf(
        tmp_path / "model.gguf",
        tmp_path,
        Kind.F32,
        arch="gpt-oss",
        others={f"{prefix}.up_proj.weight": Kind.MXFP4},
        metadata=metadata,
    )
    source = GGUFSource(file)
    for expert in range(5):
        values = tensors[name := f"{prefix}.{expert}.up_proj.weight"].numpy()
        expected = gguf.dequantize(gguf.quantize(values, Kind.MXFP4), Kind.MXFP4)
        assert (expected != values).any()
        assert (source.tensor(name).numpy() == expected).all()
        assert (source.tensor(name, rows=slice(7, 40)).numpy() == expected[7:40]).all()


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("phi3", {"rope.scaling.attn_factor": 1.2}, "longrope .* is not supported in GGUF files: use the safetensors"),
        ("phi3", {"attention.key_length": 80}, "q_proj.weight .* of 128 rows together: the first one has 320"),
        ("qwen3moe", {"expert_count": 6}, "lacks 12 of 111 tensors: model.layers.0.mlp.experts.5.gate_proj.weight"),
        ("llama", {"rope.dimension_count": 8}, "rope.dimension_count differs from the head size 16"),
    ],
)
def test_what_does_not_fit_is_refused(family: str, changes: dict[str, float], message: str, tmp_path: Path) -> None:
    architecture, fields, metadata = FAMILIES[family]
    write_model(tmp_path, architecture, fields)
    file = write_gguf(tmp_path / "model.gguf", tmp_path, Kind.F32, arch=family, metadata={**metadata, **changes})
    with pytest.raises(WeightsError, match=message):
        load_model(resolve_model(str(file)), dtype=torch.float32)
