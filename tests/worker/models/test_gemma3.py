"""Reading Gemma 3's two file formats, which must agree. test_families.py checks its logits."""

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
from worker.model_config import ModelConfig, RopeConfig
from worker.models.config import config_from_directory, config_from_gguf
from worker.models.loader import load_model
from worker.models.registry import model_class

# The config of google/gemma-3-1b-it, with fewer and smaller layers.
CONFIG: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 130,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 256,
    "query_pre_attn_scalar": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "sliding_window": 9,
    "sliding_window_pattern": 6,
    "attn_logit_softcapping": None,
    "eos_token_id": [1, 106],
}
# The metadata of the 270M's file.
GGUF: dict[str, Any] = {
    "general.architecture": "gemma3",
    "gemma3.context_length": 32768,
    "gemma3.embedding_length": 640,
    "gemma3.block_count": 18,
    "gemma3.feed_forward_length": 2048,
    "gemma3.attention.head_count": 4,
    "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
    "gemma3.attention.key_length": 256,
    "gemma3.attention.sliding_window": 512,
    "gemma3.attention.head_count_kv": 1,
    "gemma3.rope.freq_base": 1e6,
    "tokenizer.ggml.tokens": range(262144),
    "tokenizer.ggml.bos_token_id": 2,
    "tokenizer.ggml.eos_token_id": 1,
}


def _read(path: Path, config: dict[str, Any]) -> ModelConfig:
    (path / "config.json").write_text(json.dumps(config))
    return config_from_directory(path)


def test_config_json_of_old_and_new_names(tmp_path: Path) -> None:
    """Rope scaling applies only to layers with full attention."""
    old = _read(tmp_path, CONFIG | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert old.layer_windows == (9, 9, 9, 9, 9, 0, 9)
    assert old.ropes == (RopeConfig(theta=1e6, scaling="linear", factor=8.0), RopeConfig(theta=1e4))
    assert [old.rope_of(layer) for layer in range(7)] == [1, 1, 1, 1, 1, 0, 1]
    assert (old.activation, old.embedding_scale, old.attention_scale) == ("gelu_tanh", 8.0, 32**-0.5)
    assert old.norms_lack_one
    assert old.tie_word_embeddings
    assert old.qk_norm
    assert old.eos_token_ids == {1, 106}

    left_out = {"rope_theta", "rope_local_base_freq", "rope_scaling", "sliding_window_pattern"}
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    types = ["full_attention" if layer == 5 else "sliding_attention" for layer in range(7)]
    new = {key: value for key, value in CONFIG.items() if key not in left_out}
    assert _read(tmp_path, new | {"rope_parameters": ropes, "layer_types": types}) == old


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping=50\.0"),
        ({"final_logit_softcapping": 30.0}, r"final_logit_softcapping=30\.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ({"hidden_activation": "silu"}, "hidden_activation='silu'.*gelu_pytorch_tanh is"),
        ({"layer_types": ["full_attention"]}, "layer_types: 7 of"),
    ],
)
def test_what_is_not_gemma_3_is_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=rf"config\.json: {says}"):
        _read(tmp_path, CONFIG | change)


def test_gguf_metadata() -> None:
    """Not in the metadata: five of six layers have windows and their own rope, and turns end with token 106."""
    config = config_from_gguf(GGUF, ["blk.0.attn_q_norm.weight"])
    assert config.architecture == "Gemma3ForCausalLM"
    assert config.layer_windows == (512, 512, 512, 512, 512, 0) * 3
    assert config.ropes == (RopeConfig(theta=1e6), RopeConfig(theta=1e4))
    assert (config.head_size, config.attention_scale) == (256, 1 / 16)
    assert config.embedding_scale == 640**0.5
    assert config.qk_norm
    assert config.tie_word_embeddings
    assert not config.norms_lack_one
    assert config.eos_token_ids == {1, 106}


def test_scores_of_the_27b_are_divided_by_another_root_than_that_of_its_head_size() -> None:
    large = {
        "gemma3.block_count": 62,
        "gemma3.embedding_length": 5376,
        "gemma3.attention.head_count": 32,
        "gemma3.attention.head_count_kv": 16,
        "gemma3.attention.key_length": 128,
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
    }
    config = config_from_gguf(GGUF | large, [])
    assert config.attention_scale == 168**-0.5
    assert config.ropes == (RopeConfig(theta=1e6, scaling="linear", factor=8.0), RopeConfig(theta=1e4))


def test_a_gguf_file_gives_what_safetensors_give(tmp_path: Path) -> None:
    """GGUF norms hold 1 + w, and two of the four have names that mean something else in other architectures. There are
    more tokens than a window holds."""
    raw = CONFIG | {"num_hidden_layers": 2, "sliding_window_pattern": 2}
    config = _read(tmp_path, raw)
    generator = torch.Generator().manual_seed(0)
    shapes = model_class(config.architecture).tensor_shapes(config)
    tensors = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    file = write_gguf(tmp_path / "model.gguf", tmp_path, Kind.F32, arch="gemma3")
    logits = []
    for path in (tmp_path, file):
        run = ModelRun(load_model(resolve_model(str(path)), dtype=torch.float32))
        row = run.row(range(30), 30)
        logits.append(torch.cat([run.step([(row, 20)]), run.step([(row, 1)]), run.step([(row, 9)])]))
    assert relative_error(logits[1], logits[0]) < 1e-5
