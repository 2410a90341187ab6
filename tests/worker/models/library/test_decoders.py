"""Decoders of many kinds, computed by the modules of transformers, against transformers: a sample of what
`python -m benchmarks.engine.library.grid` checks."""

from pathlib import Path

import pytest
import torch

from tests.support.models.library_checks import check, load
from tests.support.models.library_models import tiny_model, write

# A scale after the head; a head with a bias, and norms with biases; Conv1D and learned positions; experts whose files
# have them one by one; biases of routers; rope of a part of a head, and fused q, k and v; keys and values of different
# sizes; windows in some layers, and embeddings with a scale; soft caps of scores and logits; sinks, and experts with
# biases; learned positions with an offset.
SAMPLE = (
    ("cohere2", "Cohere2ForCausalLM"),
    ("phi", "PhiForCausalLM"),
    ("gpt2", "GPT2LMHeadModel"),
    ("mixtral", "MixtralForCausalLM"),
    ("ernie4_5_moe", "Ernie4_5_MoeForCausalLM"),
    ("gpt_neox", "GPTNeoXForCausalLM"),
    ("deepseek_v3", "DeepseekV3ForCausalLM"),
    ("gemma3_text", "Gemma3ForCausalLM"),
    ("gemma2", "Gemma2ForCausalLM"),
    ("gpt_oss", "GptOssForCausalLM"),
    ("opt", "OPTForCausalLM"),
)


@pytest.mark.parametrize(("model_type", "name"), SAMPLE, ids=[name for _, name in SAMPLE])
def test_a_decoder_computes_as_in_transformers(model_type: str, name: str, tmp_path: Path) -> None:
    """Logits within 1e-4, equal greedy tokens; the same bits in chunks, beside others, and behind a cached prefix."""
    reference = tiny_model(model_type, name)
    checked = check(reference, load(write(reference, tmp_path)), num_tokens=24)
    assert checked.is_right, checked


def test_row_multiples_matter(tmp_path: Path) -> None:
    """Guards the padding of steps: without it, torch rounds an activation differently at the end of a tensor."""
    reference = tiny_model("arcee", "ArceeForCausalLM")
    loaded = load(write(reference, tmp_path))
    library = loaded.config.library
    assert library is not None
    assert library.row_multiple > 1
    assert loaded.model.rows_for(1) == library.row_multiple
    assert loaded.model.rows_for(library.row_multiple) == library.row_multiple


def test_linear_layers_with_one_input_are_computed_as_one(tmp_path: Path) -> None:
    loaded = load(write(tiny_model("qwen2", "Qwen2ForCausalLM"), tmp_path))
    library = loaded.config.library
    assert library is not None
    assert (
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.self_attn.k_proj",
        "model.layers.1.self_attn.v_proj",
    ) in (library.fused)


def test_own_families_come_first(tmp_path: Path) -> None:
    from runtime.model_files import resolve_model
    from worker.models.loader import load_model

    directory = write(tiny_model("llama", "LlamaForCausalLM"), tmp_path)
    files = resolve_model(str(directory))
    own = load_model(files, dtype=torch.float32)
    assert own.config.library is None
    by_library = load_model(files, dtype=torch.float32, model_impl="transformers")
    assert by_library.config.library is not None
    assert own.digest == by_library.digest
