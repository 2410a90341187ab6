"""Packed checkpoints that are damaged, incomplete or of a kind that is not supported: an error names the tensor or the
field before anything is computed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from configs.load import load_options
from runtime.model_files import resolve_model
from tests.support.checkpoints.integers import Tensors
from tests.support.checkpoints.layouts import LAYOUTS, layout_tensors, write_checkpoint
from worker.models.loader import load_model
from worker.process.build import build_runner
from worker.weights.quantization.methods import stored_quantization
from worker.weights.reader import WeightsError

SHAPE: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("floats")
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(path)
    return path


def _state(tensors: Tensors, text: bytes) -> None:
    tensors[f"{Q}.weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)


def _cut(tensors: Tensors, name: str) -> None:
    tensors[f"{Q}.{name}"] = tensors[f"{Q}.{name}"][:-1]


Edit = Callable[[Tensors], object]
DAMAGES: list[tuple[str, Edit, str]] = [
    (
        "awq-32",
        lambda t: t.pop(f"{Q}.scales"),
        rf"lacks 1 tensors of 7 quantized weights: {Q}\.scales; "
        r"config\.json says awq, 4 bits, groups of 32",
    ),
    ("awq-32", lambda t: t.pop(f"{Q}.qzeros"), rf"lacks 1 tensors of 7 quantized weights: {Q}\.qzeros"),
    ("awq-32", lambda t: t.pop(f"{Q}.qweight"), rf"lacks 1 tensors of 7 quantized weights: {Q}\.qweight"),
    (
        "awq-32",
        lambda t: _cut(t, "scales"),
        rf"{Q}\.scales has shape \[3, 128\]; \[4, 128\] is expected beside {Q}\.qweight of shape \[128, 16\], because "
        "config.json says group_size=32",
    ),
    ("awq-32", lambda t: _cut(t, "qweight"), rf"{Q}\.weight has shape \[128, 127\]; the config asks for \[128, 128\]"),
    (
        "awq-32",
        lambda t: t.update({f"{Q}.qweight": t[f"{Q}.qweight"].long()}),
        rf"{Q}\.qweight is stored as I64; I32 is expected",
    ),
    ("awq-32", lambda t: t[f"{Q}.scales"][1, 3].fill_(torch.nan), rf"{Q}\.scales holds nan; scales must be finite"),
    ("gptq-4-64-act-order", lambda t: t.pop(f"{Q}.g_idx"), rf"lacks 1 tensors of 7 quantized weights: {Q}\.g_idx"),
    (
        "gptq-4-64-act-order",
        lambda t: t[f"{Q}.g_idx"][5].fill_(2),
        rf"{Q}\.g_idx names groups 0 to 2; groups of 64 of 128 inputs are 0 to 1",
    ),
    ("gptq-4-64-act-order", lambda t: _cut(t, "g_idx"), rf"{Q}\.g_idx has shape \[127\]; \[128\] is expected"),
    ("gptq-8-128", lambda t: _cut(t, "qzeros"), rf"{Q}\.qzeros has shape \[0, 32\]; \[1, 32\] is expected"),
    ("w4a16-128", lambda t: t.pop(f"{Q}.weight_scale"), rf"lacks 1 tensors of 7 quantized weights: {Q}\.weight_scale"),
    (
        "w4a16-128",
        lambda t: t[f"{Q}.weight_shape"][1].fill_(120),
        rf"{Q}\.weight_packed has shape \[128, 16\]; \[128, 15\] is expected for a weight of shape \[128, 120\]",
    ),
    ("w4a16-128", lambda t: t[f"{Q}.weight_shape"].fill_(-1), rf"{Q}\.weight_shape holds \[-1, -1\]"),
    ("w4a16-32-asymmetric", lambda t: t.pop(f"{Q}.weight_zero_point"), rf"quantized weights: {Q}\.weight_zero_point"),
    ("nf4", lambda t: t.pop(f"{Q}.weight.absmax"), rf"lacks 1 tensors of 7 quantized weights: {Q}\.weight\.absmax"),
    ("nf4", lambda t: _cut(t, "weight.absmax"), rf"{Q}\.weight\.absmax has shape \[255\]; \[256\] is expected for sha"),
    ("nf4", lambda t: _cut(t, "weight"), rf"{Q}\.weight has 8191 bytes; 8192 are expected for shape \[128, 128\]"),
    ("nf4", lambda t: _state(t, b"{"), r"quant_state\.bitsandbytes__nf4 is damaged"),
    ("nf4", lambda t: _state(t, b'{"blocksize": 0, "shape": [128, 128]}'), r"blocksize=0 and shape=\[128, 128\] must"),
    ("nf4-double", lambda t: t.pop(f"{Q}.weight.nested_absmax"), rf"weights: {Q}\.weight\.nested_absmax"),
    ("nf4-double", lambda t: _state(t, b""), r"quant_state\.bitsandbytes__nf4 is damaged"),
    ("llm-int8", lambda t: t.pop(f"{Q}.SCB"), rf"lacks 1 tensors of 7 quantized weights: {Q}\.SCB"),
    ("mxfp4-packed", lambda t: t[f"{Q}.weight_scale"][3, 1].fill_(255), rf"{Q}\.weight_scale holds 255, which is NaN"),
    ("mxfp4-packed", lambda t: _cut(t, "weight_packed"), rf"{Q}\.weight_packed has shape \[127, 64\]; \[128, 64\] is"),
]


@pytest.mark.parametrize(("name", "edit", "says"), DAMAGES)
def test_what_is_missing_or_does_not_fit_is_named(base: Path, tmp_path: Path, name: str, edit: Edit, says: str) -> None:
    layout = LAYOUTS[name]
    stored, _ = layout_tensors(base, layout)
    if "mxfp4" in name or "g_idx" in says:
        stored = {key: tensor.clone() for key, tensor in stored.items()}
    edit(stored)
    path = write_checkpoint(tmp_path, base, stored, layout.config)
    with pytest.raises(WeightsError, match=says) as error:
        load_model(resolve_model(str(path)), dtype=torch.float32)
    assert str(path) in str(error.value)


def test_a_file_cut_short_and_floats_that_are_said_to_be_packed(base: Path, tmp_path: Path) -> None:
    layout = LAYOUTS["awq-32"]
    path = write_checkpoint(tmp_path / "cut", base, layout_tensors(base, layout)[0], layout.config)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(WeightsError, match=r"model\.safetensors: damaged or cut short, at [\d,]+ bytes"):
        load_model(resolve_model(str(path)), dtype=torch.float32)
    floats = write_checkpoint(tmp_path / "floats", base, layout_tensors(base, LAYOUTS["nf4"])[1], layout.config)
    other = write_checkpoint(tmp_path / "nf4", base, layout_tensors(base, LAYOUTS["nf4"])[0], layout.config)
    with pytest.raises(WeightsError, match=rf"{Q}\.weight is stored as U8; .* quantization_config says awq, 4 bits"):
        load_model(resolve_model(str(other)), dtype=torch.float32)
    with pytest.raises(WeightsError, match=r"stores no weight as config\.json's quantization_config says \(awq, 4 bi"):
        load_model(resolve_model(str(floats)), dtype=torch.float32)


def test_a_worker_refuses_a_damaged_checkpoint_before_it_is_ready(base: Path, tmp_path: Path) -> None:
    layout = LAYOUTS["gptq-4-128"]
    stored, _ = layout_tensors(base, layout)
    del stored[f"{Q}.qzeros"]
    path = write_checkpoint(tmp_path, base, stored, layout.config)
    options = load_options(flags={"model": str(path), "num_blocks_override": 8, "weight_cache": 0}, environ={})
    with pytest.raises(WeightsError, match=rf"lacks 1 tensors of 7 quantized weights: {Q}\.qzeros"):
        build_runner(options)


def _compressed(**weights: Any) -> dict[str, Any]:
    config = json.loads(json.dumps(LAYOUTS["w4a16-128"].config))
    config["config_groups"]["group_0"]["weights"] |= weights
    return config


AWQ, GPTQ, NF4 = (dict(LAYOUTS[name].config) for name in ("awq-128", "gptq-4-128", "nf4"))


@pytest.mark.parametrize(
    ("quantization", "says"),
    [
        ({"quant_method": "hqq"}, r"quant_method='hqq' is not supported; fp8, fbgemm_fp8, compressed-tensors, awq, gp"),
        (AWQ | {"bits": 3}, r"\(awq\): 3 bits are not supported; 4 are"),
        (AWQ | {"group_size": 20}, r"\(awq\): group_size=20 is not supported; multiples of 8 are, and -1 for all"),
        (AWQ | {"version": "gemv"}, r"\(awq\): version='gemv' is not supported; gemm is"),
        (AWQ | {"zero_point": False}, r"\(awq\): zero_point=false is not supported"),
        (GPTQ | {"bits": 3}, r"\(gptq\): 3 bits are not supported; 4 and 8 are"),
        (GPTQ | {"group_size": 0}, r"\(gptq\): group_size=0 is not supported"),
        (GPTQ | {"checkpoint_format": "marlin"}, r"checkpoint_format='marlin' is not supported; gptq and gptq_v2 are"),
        (GPTQ | {"pack_dtype": "int16"}, r"pack_dtype='int16' is not supported; int32 is"),
        (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}}, r"dynamic: '\+:\.\*down\.\*' has other bits or groups"),
        ({"quant_method": "gptq"}, r"\(gptq\): Object missing required field `bits`"),
        (_compressed(num_bits=3), r"config_groups\.group_0: 3 bits are not supported; 4 and 8 are"),
        (_compressed(group_size=None), r"config_groups\.group_0: group_size is missing; strategy='group' needs it"),
        (_compressed(group_size=12), r"config_groups\.group_0: group_size=12 is not supported"),
        (_compressed(strategy="tensor"), r"strategy='tensor' in format=pack-quantized is not supported; group, chan"),
        (_compressed(type="float"), r"float weights in format=pack-quantized are not supported; int is"),
        (
            _compressed() | {"format": "mxfp4-pack-quantized"},
            r"int weights of 4 bits in groups of 128 are not supported in format=mxfp4-pack-quantized; float",
        ),
        (NF4 | {"bnb_4bit_quant_type": "nf3"}, r"bnb_4bit_quant_type='nf3' is not supported; nf4 and fp4 are"),
        (NF4 | {"load_in_8bit": True}, r"load_in_4bit=True, load_in_8bit=True: one of them must be true"),
    ],
)
def test_what_is_not_supported_is_named_with_what_is(quantization: Any, says: str) -> None:
    with pytest.raises(ValueError, match=rf"quantization_config.*{says}"):
        stored_quantization({"quantization_config": quantization})
