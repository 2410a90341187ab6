"""Decoders of many kinds, computed by the modules of transformers, against transformers: a sample of what
`python -m benchmarks.engine.library.grid` checks."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.models.library_checks import check, load
from tests.support.models.library_models import tiny_model, write
from worker.models.library.formulas.layer import OctavoLayer
from worker.models.library.formulas.rotated import OctavoAttention
from worker.weights.quantization.kinds import QuantizationOption

# A scale after the head; a head with a bias, and norms with biases; Conv1D and learned positions; experts whose files
# have them one by one; biases of routers; rope of a part of a head, and fused q, k and v; keys and values of different
# sizes; windows in some layers, and embeddings with a scale; soft caps of scores and logits; sinks, and experts with
# biases; learned positions with an offset; a second table of embeddings, whose scale is in no file, and heads of two
# sizes.
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
    ("gemma4_text", "Gemma4ForCausalLM"),
)


@pytest.mark.parametrize(("model_type", "name"), SAMPLE, ids=[name for _, name in SAMPLE])
def test_a_decoder_computes_as_in_transformers(model_type: str, name: str, tmp_path: Path) -> None:
    """Logits within 1e-4, equal greedy tokens; the same bits in chunks, beside others, and behind a cached prefix."""
    reference = tiny_model(model_type, name)
    checked = check(reference, load(write(reference, tmp_path)), num_tokens=24)
    assert checked.is_right, checked


# Heads of a size that the cache has, so that no zeros are added: layers as one, with rope in all of them or in some,
# with norms of heads and windows; attention alone.
EXCHANGED = (
    ("llama", "LlamaForCausalLM", OctavoLayer),
    ("smollm3", "SmolLM3ForCausalLM", OctavoLayer),
    ("qwen3", "Qwen3ForCausalLM", OctavoLayer),
    ("ministral", "MinistralForCausalLM", OctavoLayer),
    ("olmo2", "Olmo2ForCausalLM", None),
    ("glm4_moe", "Glm4MoeForCausalLM", OctavoAttention),
)


@pytest.mark.parametrize(("model_type", "name", "exchanged"), EXCHANGED, ids=[name for _, name, _ in EXCHANGED])
def test_a_decoder_computes_as_in_transformers_by_its_formulas(
    model_type: str, name: str, exchanged: type[nn.Module] | None, tmp_path: Path
) -> None:
    reference = tiny_model(model_type, name, head_dim=16)
    loaded = load(write(reference, tmp_path))
    found = [type(each) for each in loaded.model._base.modules()]  # pyright: ignore[reportAttributeAccessIssue]
    assert exchanged in found or (exchanged is None and not {OctavoLayer, OctavoAttention} & {*found})
    checked = check(reference, loaded, num_tokens=24)
    assert checked.is_right, checked


@pytest.mark.parametrize(
    ("dtype", "quantization", "of_llama", "of_gpt2"),
    [
        (torch.bfloat16, "none", 0.06, 0.01),
        (torch.float32, "int8", 0.15, 0.03),
        (torch.bfloat16, "int8", 0.15, 0.03),
        (torch.bfloat16, "int4", 0.9, 0.2),
    ],
)
def test_fewer_bits_change_logits_little(
    dtype: torch.dtype, quantization: QuantizationOption, of_llama: float, of_gpt2: float, tmp_path: Path
) -> None:
    """Errors are those of the llama family's own layers, within a factor of 2. The bits of a token's logits still do
    not depend on the step."""
    for (model_type, name), most in (
        (("llama", "LlamaForCausalLM"), of_llama),
        (("gpt2", "GPT2LMHeadModel"), of_gpt2),
    ):
        reference = tiny_model(model_type, name)
        directory = write(reference, tmp_path / model_type)
        checked = check(reference, load(directory, dtype=dtype, quantization=quantization), num_tokens=8)
        assert checked.error < most, checked
        assert not checked.different, checked


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
