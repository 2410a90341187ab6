import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from octavo.lab.errors import PlanError
from octavo.plan.costs.model_shape import read_shape
from worker.layers.rotary import rope_frequencies
from worker.model_config import ModelConfig, SamplingDefaults
from worker.models.config import config_from_directory, config_from_gguf
from worker.models.rope import rope_from_config_json

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": 100,
}


def _read(path: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    (path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return config_from_directory(path)


def test_eos_ids_of_both_files_and_sampling_defaults(tmp_path: Path) -> None:
    """Llama 3's instruct models end with a token id that only generation_config.json names."""
    config = _read(tmp_path, CONFIG | {"eos_token_id": 2}, {"eos_token_id": [2, 9], "temperature": 0.6, "top_k": 20})
    assert config.eos_token_ids == {2, 9}
    assert config.default_sampling == SamplingDefaults(temperature=0.6, top_k=20)


def test_old_and_new_names_of_rope_agree(tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = _read(tmp_path, CONFIG | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}})
    new = _read(tmp_path, CONFIG | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}})
    assert old.rope == new.rope
    assert (old.rope.scaling, old.rope.theta, old.rope.factor) == ("llama3", 5e5, 8.0)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 3.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 512,
            "mscale": 0.7,
            "mscale_all_dim": 1.0,
            "beta_fast": 16.0,
            "truncate": False,
        },
    ],
)
def test_frequencies_are_those_of_transformers(rope: dict[str, Any]) -> None:
    raw = {"rope_parameters": {"rope_theta": 10000.0, **rope}, "max_position_embeddings": 2048}
    theirs = LlamaConfig(hidden_size=256, num_attention_heads=4, **raw)
    expected, magnitude = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, torch.device("cpu"))
    ours = rope_from_config_json(raw)
    torch.testing.assert_close(rope_frequencies(ours, 64), expected, rtol=1e-5, atol=0)
    assert ours.attention_factor == pytest.approx(magnitude)


@pytest.mark.parametrize("scaling", ["dynamic", "llama3", "longrope", "yarn"])
@pytest.mark.parametrize("context", [{}, {"max_position_embeddings": 0}, {"max_position_embeddings": 1}])
def test_a_scaling_without_a_context_is_refused(scaling: str, context: dict[str, Any]) -> None:
    rope = {"rope_type": scaling, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    with pytest.raises(ValueError, match=f"rope_type='{scaling}': (original_)?max_position_embeddings=(None|0|1)"):
        rope_from_config_json({"rope_parameters": rope, **context})


def test_windows_by_layer(tmp_path: Path) -> None:
    qwen = CONFIG | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 16, "max_window_layers": 3}
    assert _read(tmp_path, qwen).layer_windows == (0, 0, 0, 0)
    assert _read(tmp_path, qwen | {"use_sliding_window": True}).layer_windows == (0, 0, 0, 16)
    types = ["sliding_attention", "full_attention"] * 2
    assert _read(tmp_path, qwen | {"use_sliding_window": True, "layer_types": types}).layer_windows == (16, 0, 16, 0)
    mistral = CONFIG | {"architectures": ["MistralForCausalLM"], "sliding_window": 16}
    assert _read(tmp_path, mistral).layer_windows == (16, 16, 16, 16)
    assert _read(tmp_path, mistral | {"sliding_window": None}).layer_windows == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"architectures": ["RwkvForCausalLM"]}, "RwkvForCausalLM.*keep a state of their own.*docs/models.md lists"),
        ({"architectures": None}, "is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "rope_type='proportional'.*yarn"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type='longrope': short_factor=None"),
        ({"rope_scaling": {"type": "linear"}}, "factor=None"),
        ({"rope_scaling": {"type": "linear", "factor": True}}, "factor=True is not a number above 0"),
        ({"rope_scaling": {"type": "yarn", "factor": 0}}, "factor=0 is not a number above 0"),
        ({"rope_scaling": {"type": "yarn", "factor": 1e400}}, "factor=inf is not a number above 0"),
        ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": -8}}, "embeddings=-8 is not"),
        ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": "8k"}}, "embeddings='8k' is not"),
        ({"num_key_value_heads": 3}, "num_kv_heads=3"),
        ({"head_dim": 15}, "head_size is 15: it must be even"),
        ({"vocab_size": 0}, "vocab_size is 0: it must be at least 1"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=rf"config\.json: .*{says}"):
        _read(tmp_path, CONFIG | change)


def test_a_missing_number_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json: hidden_size is missing"):
        _read(tmp_path, {key: value for key, value in CONFIG.items() if key != "hidden_size"})


@pytest.mark.parametrize(
    "data",
    [
        b'{"architectures": [',
        b"\xef\xbb\xbf{}",
        b'{"a": "\xff"}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_damaged_json_is_named(tmp_path: Path, data: bytes) -> None:
    """By workers and by `octavo plan`, which read the same files."""
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(ValueError, match=r"config.json: not valid JSON"):
        config_from_directory(tmp_path)
    with pytest.raises(PlanError, match=r"config.json is not valid JSON"):
        read_shape(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "generation_config.json").write_bytes(data)
    with pytest.raises(ValueError, match=r"generation_config.json: not valid JSON"):
        config_from_directory(tmp_path)


@pytest.mark.parametrize("name", [*CONFIG, "text_config", "quantization_config", "rope_scaling", "rope_theta"])
def test_values_of_any_kind_are_read_or_refused_by_the_files_name(tmp_path: Path, name: str) -> None:
    for value in (float("inf"), float("nan"), -1, 2**70, 1e300, "x", [], [1], {}, {"a": 1}, True, None):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | {name: value}))
        for read, error in ((config_from_directory, ValueError), (lambda path: read_shape(str(path)), PlanError)):
            try:
                read(tmp_path)
            except error as refused:
                assert "config.json" in str(refused)  # noqa: PT017 - most values are read


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", float("nan")),
        ("top_p", float("inf")),
        ("top_k", 1.5),
        ("top_k", True),
        ("top_k", 2**40),
        ("min_p", "x"),
        ("repetition_penalty", [1]),
    ],
)
def test_defaults_of_sampling_are_numbers(tmp_path: Path, name: str, value: Any) -> None:
    """They would be in every request."""
    with pytest.raises(ValueError, match=rf"generation_config\.json: {name}=.*: a number is expected"):
        _read(tmp_path, CONFIG, {name: value})


def test_gguf_metadata() -> None:
    metadata = GGUF | {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 7, "llama.rope.freq_base": 5e5}
    config = config_from_gguf(metadata, ["output.weight", "blk.0.attn_q.bias"], (1.0, 2.0))
    assert config.architecture == "LlamaForCausalLM"
    assert (config.head_size, config.num_kv_heads, config.rope.theta) == (16, 2, 5e5)
    assert config.eos_token_ids == {2, 7}
    assert config.qkv_bias
    assert not config.tie_word_embeddings
    assert config.rope.freq_factors == (1.0, 2.0)


def test_gguf_of_another_architecture_or_without_a_number() -> None:
    with pytest.raises(ValueError, match=r"'bert' is not supported; .*gemma2, gemma3, .*qwen2, .*qwen3"):
        config_from_gguf(GGUF | {"general.architecture": "bert"}, [])
    with pytest.raises(ValueError, match=r"lacks llama\.block_count"):
        config_from_gguf({key: value for key, value in GGUF.items() if key != "llama.block_count"}, [])
