"""Mixtures of experts on a CPU: a token's result does not depend on the experts that other tokens chose."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from runtime.model_files import resolve_model
from tests.support.models.model_runs import ModelRun
from worker.models.config import config_from_directory
from worker.models.loader import load_model
from worker.models.registry import model_class

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    config = config_from_directory(tmp_path)
    generator = torch.Generator().manual_seed(0)
    shapes = model_class(config.architecture).tensor_shapes(config)
    tensors = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_a_sequence_has_its_bits_alone_and_in_any_company(model: Path, quantization) -> None:
    loaded = load_model(resolve_model(str(model)), dtype=torch.bfloat16, quantization=quantization)
    run = ModelRun(loaded, dtype=torch.bfloat16)
    tokens = torch.randint(131, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    alone, among = run.row(tokens[:20], 20), run.row(tokens[:20], 20)
    expected = run.step([(alone, 20)])
    other, last = run.row(tokens[20:50], 30), run.row(tokens[50:], 10)
    got = [
        run.step([(other, 7), (among, 9)])[7:],
        run.step([(among, 10), (last, 10), (other, 20)])[:10],
        run.step([(other, 3), (among, 1)])[3:],
    ]
    assert torch.equal(torch.cat(got), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 7}, "num_experts_per_tok is 7: it must be 1 to 6"),
        ({"moe_intermediate_size": 0}, "intermediate size 0"),
        ({"num_experts": None}, "config.json"),
    ],
)
def test_mixtures_that_cannot_be_are_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **change}))
    with pytest.raises(ValueError, match=message):
        config_from_directory(tmp_path)
