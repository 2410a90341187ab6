"""GGUF files with the names, orders and metadata of llama.cpp's converter (ggml-org/llama.cpp) give what safetensors
give."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file

from runtime.model_files import resolve_model
from tests.support.models.gguf_files import write_gguf
from tests.support.models.model_runs import ModelRun, relative_error
from worker.models.config import config_from_directory
from worker.models.loader import load_model
from worker.models.registry import model_class

SHAPE: dict[str, Any] = {
    "vocab_size": 80, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "rope_theta": 10000.0,
}  # fmt: skip
_WINDOWS = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 2}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma2": (
        "Gemma2ForCausalLM",
        {
            **_WINDOWS, "tie_word_embeddings": True, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 3.0,
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
            "attention.sliding_window": 9, "attention.sliding_window_pattern": [True, False] * 2,
            "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32,
        },
    ),
    "smollm3": ("SmolLM3ForCausalLM", {}, {}),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gguf_file_gives_what_safetensors_give(family: str, tmp_path: Path) -> None:
    architecture, fields, metadata = FAMILIES[family]
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, **fields, "architectures": [architecture]}))
    config = config_from_directory(tmp_path)
    generator = torch.Generator().manual_seed(0)
    shapes = model_class(architecture).tensor_shapes(config)
    tensors = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    arch = "olmo2" if family == "olmo3" else family
    scaling = "yarn" if family == "olmo3" else None
    file = write_gguf(tmp_path / "model.gguf", tmp_path, Kind.F32, arch=arch, metadata=metadata, rope_scaling=scaling)
    logits = []
    for path in (tmp_path, file):
        run = ModelRun(load_model(resolve_model(str(path)), dtype=torch.float32))
        row = run.row(range(30), 30)
        logits.append(torch.cat([run.step([(row, 20)]), run.step([(row, 1)]), run.step([(row, 9)])]))
    assert relative_error(logits[1], logits[0]) < 1e-5
