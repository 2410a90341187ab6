"""Reading Llama 4's files and its experts' weights. test_families.py checks its logits, tests/worker/gpu_models those
on GPUs, tests/worker/parallel those on ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Llama4ForCausalLM, Llama4TextConfig

from kernels.backend import torch_backend
from runtime.model_files import resolve_model
from tests.support.models.model_runs import ModelRun, relative_error
from worker.layers.attention import QueryTemperature
from worker.layers.forward_context import Workspace
from worker.model_config import NO_ROPE, AttentionSpan, ModelConfig
from worker.models.config import config_from_directory
from worker.models.families.llama4 import Llama4Files
from worker.models.loader import load_model
from worker.models.registry import model_class
from worker.weights.quantization.methods import stored_quantization
from worker.weights.reader import WeightsError
from worker.weights.safetensors_source import SafetensorsSource
from worker.weights.source import check_tensors

# The text_config of meta-llama/Llama-4-Scout-17B-16E, with fewer and smaller layers.
TEXT: dict[str, Any] = {
    "model_type": "llama4_text",
    "vocab_size": 130,
    "hidden_size": 32,
    "intermediate_size": 48,
    "intermediate_size_mlp": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 1000,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "num_local_experts": 3,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "no_rope_layers": [],
    "use_qk_norm": True,
    "attention_chunk_size": 20,
    "attn_temperature_tuning": True,
    "attn_scale": 0.1,
    "floor_scale": 100,
    "eos_token_id": [7, 8],
}
WHOLE: dict[str, Any] = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "model_type": "llama4",
    "text_config": TEXT,
    "vision_config": {"hidden_size": 8, "num_hidden_layers": 1},
}


def _read(path: Path, config: dict[str, Any]) -> ModelConfig:
    (path / "config.json").write_text(json.dumps(config))
    return config_from_directory(path)


def test_the_text_model_of_one_that_sees(tmp_path: Path) -> None:
    config = _read(tmp_path, WHOLE)
    assert config == _read(tmp_path, TEXT | {"architectures": ["Llama4ForConditionalGeneration"]})
    assert [config.attention_span_of(layer) for layer in range(5)] == [AttentionSpan(attention_chunk=20)] * 3 + [
        AttentionSpan(),
        AttentionSpan(attention_chunk=20),
    ]
    assert [config.ropes[config.rope_of(layer)] == NO_ROPE for layer in range(5)] == [False, False, False, True, False]
    assert config.norms_rotated_heads
    assert [config.has_temperature(layer) for layer in range(5)] == [False, False, False, True, False]
    assert config.experts is not None
    assert config.experts.layers == (False, True, False, True, False)
    assert (config.intermediate_size, config.experts.intermediate_size) == (64, 48)
    assert config.eos_token_ids == {7, 8}


def test_what_a_file_may_leave_out(tmp_path: Path) -> None:
    """Maverick normalizes no heads; a file may list layers instead of a pattern."""
    others = {
        "use_qk_norm": False,
        "attn_temperature_tuning": False,
        "moe_layers": [0],
        "no_rope_layers": [0, 1, 1, 1, 1],
    }
    config = _read(tmp_path, TEXT | others | {"architectures": ["Llama4ForCausalLM"]})
    assert config.rope_layers == (False, True, True, True, True)
    assert not config.norms_rotated_heads
    assert not any(config.has_temperature(layer) for layer in range(5))
    assert config.experts is not None
    assert config.experts.layers == (True, False, False, False, False)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layer_types": ["sliding_attention"] * 5}, "layer_types: 5 of full_attention or chunked_attention"),
        ({"attention_chunk_size": None}, "attention_chunk_size=None must be at least 1"),
        ({"no_rope_layers": [1, 1]}, "no_rope_layers has 2 numbers for 5 layers"),
        ({"floor_scale": 0}, "floor_scale is 0: it must be at least 1"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type='yarn' with use_qk_norm"),
    ],
)
def test_what_is_not_llama_4_is_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=rf"config\.json: {says}"):
        _read(tmp_path, WHOLE | {"text_config": TEXT | change})


def test_queries_grow_with_their_position(tmp_path: Path) -> None:
    """They grow in steps; the last position has its own step, and a value does not depend on the other positions."""
    path = torch_backend(torch.float32)
    workspace, temperature = Workspace(path), QueryTemperature(_read(tmp_path, WHOLE), path)
    workspace.reserve(6)
    got = temperature(torch.tensor([0, 98, 99, 199, 500, 999]), workspace)
    assert got is not None
    steps = torch.tensor([0, 0, 1, 2, 5, 10])
    torch.testing.assert_close(got.double(), 1 + 0.1 * torch.log1p(steps.double()), rtol=1e-6, atol=0)
    one = got[4].clone()
    assert temperature(torch.tensor([500]), workspace) == one


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_has_the_same_bits_however_it_is_cut_and_beside_others(tmp_path: Path, dtype: torch.dtype) -> None:
    """It spans several attention chunks and temperature steps; some parts are decodes."""
    _read(tmp_path, WHOLE | {"text_config": TEXT | {"floor_scale": 7}})
    loaded = load_model(resolve_model(str(tmp_path)), dtype=dtype, load_format="dummy")
    prompts = [torch.randint(130, (70,), generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(2)]
    run = ModelRun(loaded, dtype=loaded.model.backend.kv_cache_dtype)
    whole = run.step([(run.row(prompts[0], 70), 70)])
    row, other = (run.row(prompt, 70) for prompt in prompts)
    parts = [
        run.step([(other, others), (row, count)])[others:] for others, count in ((9, 19), (1, 1), (40, 1), (1, 49))
    ]
    assert torch.equal(torch.cat(parts), whole)


def _whole_checkpoint(directory: Path) -> tuple[Llama4ForCausalLM, dict[str, torch.Tensor]]:
    """A checkpoint like the published ones: the text model's tensors under language_model, beside a vision model's."""
    torch.manual_seed(0)
    config = Llama4TextConfig(**{name: value for name, value in TEXT.items() if name != "model_type"})
    model = Llama4ForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.2)
    model.save_pretrained(directory)
    stored = load_file(directory / "model.safetensors")
    tensors = {f"language_model.{name}": tensor for name, tensor in stored.items()}
    tensors |= {"vision_model.patch_embedding.linear.weight": torch.zeros(3, 3)}
    tensors |= {"multi_modal_projector.linear_1.weight": torch.zeros(3, 3)}
    _save(directory, tensors)
    (directory / "config.json").write_text(json.dumps(WHOLE))
    return model, tensors


def _save(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def test_experts_stored_together_or_one_by_one_beside_a_vision_model(tmp_path: Path) -> None:
    """Logits match transformers' text model. A checkpoint that stores each expert separately, as quantized ones do, has
    the same bits."""
    model, tensors = _whole_checkpoint(tmp_path)
    prompt = torch.randint(130, (50,), generator=torch.Generator().manual_seed(1)).tolist()

    def logits() -> torch.Tensor:
        run = ModelRun(load_model(resolve_model(str(tmp_path)), dtype=torch.float32))
        return run.step([(run.row(prompt, 50), 50)])

    together = logits()
    with torch.inference_mode():
        assert relative_error(together, model(torch.tensor([prompt])).logits[0]) < 1e-4
    files = Llama4Files(tmp_path)
    kept = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    _save(tmp_path, kept | {files.stored_name(name): files.read(name) for name in files.shapes if ".experts." in name})
    assert torch.equal(logits(), together)


def test_experts_of_e4m3_under_the_names_that_the_config_calls_them_by(tmp_path: Path) -> None:
    """quantization_config uses the names of the whole model."""
    _whole_checkpoint(tmp_path)
    files, tensors = Llama4Files(tmp_path), dict[str, torch.Tensor]()
    for name in files.shapes:
        tensors[files.stored_name(name)] = files.read(name)
    expert = "model.layers.1.feed_forward.experts.2.up_proj.weight"
    ignored = ["language_model.lm_head", "re:language_model.*self_attn", "re:.*router", "re:.*shared_expert"]
    ignored += [f"language_model.model.layers.{layer}.feed_forward" for layer in (0, 2, 4)]
    for name, tensor in [*tensors.items()]:
        if ".experts." in name:
            tensors[name] = tensor.to(torch.float8_e4m3fn)
            tensors[f"{name}_scale"] = torch.full((len(tensor), 1), 0.5)
    _save(tmp_path, tensors)
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    quantized = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ignored,
    }
    shapes = model_class("Llama4ForConditionalGeneration").tensor_shapes(_read(tmp_path, WHOLE))
    source = SafetensorsSource(Llama4Files(tmp_path), stored_quantization({"quantization_config": quantized}), shapes)
    check_tensors(source, shapes, tied=False, left_out=("vision_model.", "multi_modal_projector."))
    assert torch.equal(source.tensor(expert), tensors[f"language_model.{expert}"].float() * 0.5)
    assert not source.is_left_out(expert)
    assert source.is_left_out("model.layers.0.feed_forward.up_proj.weight")


def test_what_an_expert_is_read_from(tmp_path: Path) -> None:
    """Gate and up are columns side by side; rows are inputs."""
    _, tensors = _whole_checkpoint(tmp_path)
    files, prefix = Llama4Files(tmp_path), "model.layers.1.feed_forward.experts"
    gate_up, down = (tensors[f"language_model.{prefix}.{name}"] for name in ("gate_up_proj", "down_proj"))
    expected = {"gate_proj": gate_up[2, :, :48].T, "up_proj": gate_up[2, :, 48:].T, "down_proj": down[2].T}
    for name, weight in expected.items():
        assert files.shapes[f"{prefix}.2.{name}.weight"] == tuple(weight.shape)
        assert torch.equal(files.read(f"{prefix}.2.{name}.weight"), weight)


def test_a_checkpoint_that_lacks_experts_is_refused(tmp_path: Path) -> None:
    _, tensors = _whole_checkpoint(tmp_path)
    name = "language_model.model.layers.1.feed_forward.experts.down_proj"
    _save(tmp_path, tensors | {name: tensors[name][:2].contiguous()})
    with pytest.raises(WeightsError, match=r"lacks 1 of .* tensors: model\.layers\.1\.feed_forward\.experts\.2\.down"):
        load_model(resolve_model(str(tmp_path)), dtype=torch.float32)
