"""Ropes that depend on the longest sequence: max_model_len chooses their frequencies once, for all sequences."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM, PreTrainedModel

from runtime.model_files import resolve_model
from tests.support.models.model_runs import ModelRun, relative_error
from worker.models.loader import load_model

SHAPE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.5, 7.0, 9.0],
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0}


def _model(model: PreTrainedModel, path: Path) -> PreTrainedModel:
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.eval().save_pretrained(path)
    return model


def _error(reference: PreTrainedModel, path: Path, length: int, max_model_len: int) -> float:
    """Compares with transformers, which has the whole prompt in one pass, in two chunks."""
    loaded = load_model(resolve_model(str(path)), dtype=torch.float32, max_model_len=max_model_len)
    prompt = torch.randint(131, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    run = ModelRun(loaded)
    row = run.row(prompt, length)
    got_TV = torch.cat([run.step([(row, count)]) for count in (length // 2, length - length // 2)])
    with torch.inference_mode():
        return relative_error(got_TV, reference(torch.tensor([prompt])).logits[0])


@pytest.mark.parametrize(("length", "max_model_len"), [(16, 16), (5, 16), (17, 0), (60, 0), (17, 17)])
def test_longrope_has_long_factors_if_any_sequence_may_be_long(length: int, max_model_len: int, tmp_path: Path) -> None:
    """transformers takes the short factors for up to 16 tokens, and the long ones beyond."""
    config = Phi3Config(**SHAPE, pad_token_id=0, original_max_position_embeddings=16, rope_parameters=LONGROPE)
    assert _error(_model(Phi3ForCausalLM(config), tmp_path), tmp_path, length, max_model_len) < 1e-4


@pytest.mark.parametrize(("length", "max_model_len"), [(20, 0), (64, 0), (100, 100), (192, 192)])
def test_dynamic_rope_stretches_to_max_model_len(length: int, max_model_len: int, tmp_path: Path) -> None:
    """transformers stretches for a sequence's own length, from 64 tokens on: the same for the longest sequence."""
    reference = _model(LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=DYNAMIC)), tmp_path)
    assert _error(reference, tmp_path, length, max_model_len) < 1e-4


def test_a_replica_of_another_rope_has_another_fingerprint(tmp_path: Path) -> None:
    _model(LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=DYNAMIC)), tmp_path)
    files = resolve_model(str(tmp_path))
    configs = [load_model(files, dtype=torch.float32, max_model_len=length).config for length in (0, 50, 64, 65, 192)]
    assert [config.rope.variant for config in configs] == ["dynamic 64"] * 3 + ["dynamic 65", "dynamic 192"]
    assert configs[0].longest_context == 192
