"""Granite's multipliers; Granite 4's dense models, and hybrid ones, which errors name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

from runtime.model_files import resolve_model
from tests.support.models.model_runs import ModelRun, relative_error
from worker.models.families.granite import granite_dense_fields, granite_fields
from worker.models.loader import load_model

CONFIG: dict[str, Any] = {
    "max_position_embeddings": 64,
    "rms_norm_eps": 0.01,
    "shared_intermediate_size": 24,
    "num_local_experts": 0,
}


@pytest.mark.parametrize("position_embedding_type", ["rope", None])
def test_a_dense_model_of_granite_4(position_embedding_type: str | None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = GraniteMoeHybridForCausalLM(
        GraniteMoeHybridConfig(
            **CONFIG,
            vocab_size=131,
            hidden_size=48,
            intermediate_size=1,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=2,
            layer_types=["full_attention"] * 2,
            mamba_n_heads=12,
            position_embedding_type=position_embedding_type,
            residual_multiplier=0.4,
            embedding_multiplier=3.0,
            attention_multiplier=0.3,
            logits_scaling=2.0,
        )
    ).eval()
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(tmp_path)
    run = ModelRun(load_model(resolve_model(str(tmp_path)), dtype=torch.float32))
    prompt = torch.randint(131, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    row = run.row(prompt, 40)
    got = torch.cat([run.step([(row, count)]) for count in (25, 1, 14)])
    with torch.inference_mode():
        assert relative_error(got, model(torch.tensor([prompt])).logits[0]) < 1e-4


def test_the_residual_multiplier_changes_epsilon() -> None:
    """A norm of the stream divided by 1/2 has 4 times the squares."""
    fields = granite_fields({**CONFIG, "residual_multiplier": 0.5, "attention_multiplier": 0.25}, 2)
    assert fields["rms_norm_eps"] == 0.04
    assert fields["query_pre_attn_scalar"] ** -0.5 == 0.25


@pytest.mark.parametrize("multiplier", ["residual_multiplier", "attention_multiplier", "logits_scaling"])
def test_multipliers_are_above_0(multiplier: str) -> None:
    with pytest.raises(ValueError, match=f"{multiplier}=0 must be a number above 0"):
        granite_fields({**CONFIG, multiplier: 0}, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["attention", "mamba"]}, "2 of attention are expected, not 2 with mamba; state-space"),
        ({"layer_types": None}, "state-space layers are not supported"),
        ({"layer_types": ["attention"]}, "2 of attention are expected, not 1 with no other"),
        ({"num_local_experts": 8}, "num_local_experts=8 is not supported"),
    ],
)
def test_hybrid_models_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        granite_dense_fields({**CONFIG, "layer_types": ["attention"] * 2, **change}, 2)


def test_dense_models_may_have_no_rope() -> None:
    fields = granite_dense_fields({**CONFIG, "layer_types": ["attention"] * 2}, 2)
    assert fields["rope_layers"] == (False, False)
    assert fields["intermediate_size"] == 24
