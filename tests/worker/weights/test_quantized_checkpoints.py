"""FP8 and W8A8 checkpoints in each format in use, made by hand from a tiny model: they give the same results as
the same numbers stored as floats."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from configs.load import load_options
from kernels.linear.weights import Int4Weight, Int8Weight, dequantize
from protos.inference_pb2 import ModelInfo
from runtime.model_files import resolve_model
from tests.support.models.model_runs import ModelRun, relative_error
from worker.models.families.llama import LlamaModel
from worker.models.loader import LoadedModel, load_model
from worker.process.build import build_runner
from worker.weights.quantization.kinds import Quantization
from worker.weights.quantization.methods import stored_quantization
from worker.weights.reader import WeightsError
from worker.weights.safetensors_files import SafetensorsFiles
from worker.weights.safetensors_source import SafetensorsSource
from worker.weights.source import SourceReader

Tensors = dict[str, torch.Tensor]
Q, DOWN = (f"model.layers.1.{name}.weight" for name in ("self_attn.q_proj", "mlp.down_proj"))
# Sizes that are no multiples of 128, and fewer rows of k and v than a block has.
SHAPE: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 160,
    "intermediate_size": 200,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
FP8, INT8 = torch.float8_e4m3fn, torch.int8
INT8_INPUTS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}


def _compressed(
    strategy: str, kind: str = "float", inputs: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        **more,
    }


@dataclass(frozen=True)
class Format:
    """The format in which a tool stores a checkpoint. block: rows and columns that share a scale; 0 means all."""

    config: dict[str, Any]
    block: tuple[int, int]
    scale_name: str = "weight_scale"
    scale_dtype: torch.dtype = torch.float32
    stored: torch.dtype = FP8
    scalar: bool = False
    # Scales that the checkpoint has and nothing needs.
    beside_layer: tuple[str, ...] = ()
    at_attention: tuple[str, ...] = ()
    skipped: tuple[str, ...] = field(default=("lm_head",))


DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FORMATS = {
    "deepseek": Format(DEEPSEEK, (128, 128), "weight_scale_inv"),
    "qwen3": Format(
        {**DEEPSEEK, "modules_to_not_convert": ["lm_head", "model.layers.0.mlp"]},
        (128, 128),
        "weight_scale_inv",
        torch.bfloat16,
        skipped=("lm_head", "layers.0.mlp."),
    ),
    "autofp8": Format(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        (0, 0),
        scalar=True,
        beside_layer=("input_scale",),
    ),
    "transformers-tensor": Format(
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None, "dequantize": False},
        (0, 0),
        "weight_scale_inv",
        torch.bfloat16,
        scalar=True,
        beside_layer=("activation_scale",),
    ),
    "fbgemm": Format(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["model.layers.1"]},
        (1, 0),
        beside_layer=("input_scale_ub",),
        skipped=("lm_head", "layers.1."),
    ),
    "compressed-tensor": Format(
        _compressed("tensor"), (0, 0), beside_layer=("input_scale",), at_attention=("k_scale", "v_scale")
    ),
    "compressed-channel": Format(
        _compressed("channel", ignore=["lm_head", "re:.*down_proj$"]),
        (1, 0),
        scale_dtype=torch.bfloat16,
        skipped=("lm_head", "down_proj"),
    ),
    "compressed-block": Format(_compressed("block"), (128, 128)),
    "w8a8": Format(_compressed("channel", "int", INT8_INPUTS), (1, 0), stored=INT8, scale_dtype=torch.bfloat16),
    "w8a16": Format(_compressed("channel", "int"), (1, 0), stored=INT8),
}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.2)
    return model


@pytest.fixture(scope="module")
def base(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("floats")
    model.save_pretrained(path)
    return path


def _stored(weight: torch.Tensor, how: Format) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Stored values, their scales, and the floats that they represent."""
    rows, columns = (step or size for step, size in zip(how.block, weight.shape, strict=True))
    blocks = [[part.abs().max() for part in row.split(columns, dim=1)] for row in weight.split(rows)]
    largest = 127 if how.stored is INT8 else torch.finfo(FP8).max
    scales = (torch.stack([torch.stack(row) for row in blocks]) / largest).to(how.scale_dtype)
    spread = torch.kron(scales.float(), torch.ones(rows, columns))[: len(weight), : weight.shape[1]]
    values = (weight / spread).round().clamp(-128, 127) if how.stored is INT8 else weight / spread
    values = values.to(how.stored)
    if how.block == (0, 0):
        scales = scales.reshape(() if how.scalar else (1,))
    return values, scales, values.float() * spread


def _tensors(base: Path, how: Format) -> tuple[Tensors, Tensors]:
    """The checkpoint's tensors, as stored and as floats."""
    stored: Tensors = {}
    floats: Tensors = {}
    for name, weight in load_file(base / "model.safetensors").items():
        layer = name.removesuffix("weight")
        if "_proj" not in name or any(part in name for part in how.skipped):
            stored[name] = floats[name] = weight
            continue
        stored[name], stored[layer + how.scale_name], floats[name] = _stored(weight, how)
        stored |= {layer + scale: torch.tensor([0.5]) for scale in how.beside_layer}
        if "k_proj" in name:
            attention = layer.removesuffix("k_proj.")
            stored |= {attention + scale: torch.tensor([0.5]) for scale in how.at_attention}
    return stored, floats


def _write(path: Path, base: Path, tensors: Tensors, quantization: dict[str, Any] | None) -> Path:
    path.mkdir(exist_ok=True)
    config = json.loads((base / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    save_file(tensors, path / "model.safetensors")
    return path


def _load(path: Path, quantization: Any = "auto", dtype: torch.dtype = torch.float32) -> LoadedModel:
    return load_model(resolve_model(str(path)), dtype=dtype, quantization=quantization)


def _logits(loaded: LoadedModel) -> torch.Tensor:
    run = ModelRun(loaded)
    return run.step([(run.row(TOKENS, len(TOKENS)), len(TOKENS))])


TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def _reader(path: Path, quantization: Quantization, dtype: torch.dtype = torch.float32) -> SourceReader:
    config = json.loads((path / "config.json").read_text())
    shapes = LlamaModel.tensor_shapes(_load(path).config)
    source = SafetensorsSource(SafetensorsFiles(path), stored_quantization(config), shapes)
    return SourceReader(source, shapes, dtype, quantization, lambda fraction: None)


@pytest.fixture(scope="module", params=FORMATS)
def how(request: pytest.FixtureRequest) -> Format:
    return FORMATS[request.param]


@pytest.fixture(scope="module")
def checkpoint(how: Format, base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Tensors]:
    """The checkpoint, a checkpoint of its floats, and the floats."""
    path = tmp_path_factory.mktemp("checkpoint")
    stored, floats = _tensors(base, how)
    return _write(path / "stored", base, stored, how.config), _write(path / "floats", base, floats, None), floats


def test_it_computes_what_its_floats_compute(checkpoint: tuple[Path, Path, Tensors], model: LlamaForCausalLM) -> None:
    path, of_floats, floats = checkpoint
    logits = _logits(_load(path, "none"))
    assert torch.equal(logits, _logits(_load(of_floats)))
    reference = LlamaForCausalLM(model.config).eval()
    reference.load_state_dict(floats)
    with torch.inference_mode():
        assert relative_error(logits, reference(torch.tensor([TOKENS])).logits[0]) < 1e-4


def test_bfloat16_rounds_the_products_once(checkpoint: tuple[Path, Path, Tensors]) -> None:
    path, _, floats = checkpoint
    reader = _reader(path, "none", torch.bfloat16)
    for name in (Q, DOWN, "lm_head.weight"):
        weight = reader.weight(name)
        assert isinstance(weight, torch.Tensor)
        assert torch.equal(weight, floats[name].bfloat16())


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_it_can_be_quantized_anew(
    checkpoint: tuple[Path, Path, Tensors], how: Format, base: Path, tmp_path: Path, quantization: Quantization
) -> None:
    """The logits are near those of the dequantized weights: only inputs are rounded as well, which random weights
    amplify. (200 inputs of down_proj end within a group.)"""
    path, _, floats = checkpoint
    reader, anew = _reader(path, quantization), dict(floats)
    for name in (name for name in floats if "_proj" in name):
        weight = reader.weight(name)
        assert isinstance(weight, Int8Weight if quantization == "int8" else Int4Weight)
        anew[name] = dequantize(weight)
        error = relative_error(anew[name], floats[name])
        is_kept = quantization == "int8" and how.stored is INT8 and not any(part in name for part in how.skipped)
        assert error == 0 if is_kept else 0 < error < (0.0040 if quantization == "int8" else 0.0670)
    anew["lm_head.weight"] = dequantize(reader.head_weight("lm_head.weight"))
    logits, expected = _logits(_load(path, quantization)), _logits(_load(_write(tmp_path, base, anew, None)))
    assert torch.cosine_similarity(logits, expected).min() > 0.97


# --- W8A8


def test_w8a8_keeps_its_integers_and_scales_and_is_what_auto_gives(base: Path, tmp_path: Path) -> None:
    how = FORMATS["w8a8"]
    stored, _ = _tensors(base, how)
    stored[Q][0, 0] = -128
    path = _write(tmp_path, base, stored, how.config)
    weight = _reader(path, "int8").weight(Q)
    assert isinstance(weight, Int8Weight)
    assert torch.equal(weight.values_OI, stored[Q])
    assert torch.equal(weight.scales_OG, stored[Q.removesuffix("weight") + "weight_scale"].float())
    assert weight.scales_OG.is_contiguous()
    assert _load(path).quantization == "int8"
    assert _load(path, "none").quantization == "none"


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "w8a8"])
def test_auto_computes_all_others_in_floats(base: Path, tmp_path: Path, name: str) -> None:
    how = FORMATS[name]
    assert _load(_write(tmp_path, base, _tensors(base, how)[0], how.config)).quantization == "none"


def test_w8a8_with_a_scale_for_a_whole_tensor(base: Path, tmp_path: Path) -> None:
    how = Format(_compressed("tensor", "int", INT8_INPUTS), (0, 0), stored=INT8)
    stored, floats = _tensors(base, how)
    weight = _reader(_write(tmp_path, base, stored, how.config), "int8").weight(Q)
    assert isinstance(weight, Int8Weight)
    assert weight.scales_OG.shape == (len(floats[Q]), 1)
    assert torch.equal(dequantize(weight), floats[Q])


def test_a_worker_says_what_auto_stands_for_and_what_the_weights_take(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    how = FORMATS["w8a8"]
    path = _write(tmp_path, base, _tensors(base, how)[0], how.config)

    def info(quantization: str) -> ModelInfo:
        flags = {"model": str(path), "quantization": quantization, "num_blocks_override": 8, "weight_cache": 0}
        return build_runner(load_options(flags=flags, environ={})).model_info

    with caplog.at_level("INFO", "octavo.worker"):
        auto, none = info("auto"), info("none")
    assert (auto.quantization, none.quantization) == ("int8", "none")
    assert auto.fingerprint == info("int8").fingerprint != none.fingerprint
    assert "quantization int8, computed by cpu-" in caplog.text
    sizes = {name: _load(path, name, torch.bfloat16).model.weight_bytes for name in ("none", "int8", "int4")}
    assert 90 * 160 * 2 < sizes["int4"] < sizes["int8"] < sizes["none"] < 2_000_000


# --- what does not fit

SCALE = "model.layers.1.self_attn.q_proj.weight_scale_inv"
Edit = Callable[[Tensors], object]


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda t: [t.pop(SCALE), t.pop(DOWN + "_scale_inv")], rf"lacks 2 tensors of 14 quantized weights: {SCALE}, "),
        (
            lambda t: t.update({SCALE: t[SCALE][:1]}),
            rf"{SCALE} has shape \[1, 2\]; \[2, 2\] is expected for {Q}, of shape \[160, 160\]",
        ),
        (lambda t: t.update({SCALE: t[SCALE].flatten()}), rf"{SCALE} has shape \[4\]; \[2, 2\] is expected"),
        (lambda t: t[SCALE][1, 0].fill_(torch.nan), rf"{SCALE} holds nan; scales must be finite"),
        (lambda t: t[SCALE][1, 0].fill_(-torch.inf), rf"{SCALE} holds -inf; scales must be finite"),
        (lambda t: t.update({SCALE: t[SCALE].int()}), rf"{SCALE} is stored as I32; F32, BF16, F16 or F64 is expected"),
        (lambda t: t.update({Q: t[Q].float()}), rf"{Q} is stored as F32; F8_E4M3 is expected, because config"),
        (lambda t: t.update({Q: t[Q].float().to(torch.float8_e5m2)}), rf"{Q} is stored as F8_E5M2; F8_E4M3 is"),
        (
            lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(FP8)}),
            r"lm_head\.weight is stored as F8_E4M3; F32, BF16, F16 or F64 is expected, because config\.json's",
        ),
        (
            lambda t: t.update({"lm_head.weight_scale_inv": torch.ones(1, 2)}),
            r"1 tensors are not of this architecture: lm_head\.weight_scale_inv",
        ),
        (
            lambda t: t.update({"model.layers.1.self_attn.q_proj.weight_zero_point": torch.ones(1)}),
            r"1 tensors are not of this architecture: .*q_proj\.weight_zero_point",
        ),
        (lambda t: t.pop(Q), rf"lacks 1 of 21 tensors: {Q}"),
    ],
)
def test_what_does_not_fit_its_config_is_named(base: Path, tmp_path: Path, edit: Edit, says: str) -> None:
    stored, _ = _tensors(base, FORMATS["deepseek"])
    edit(stored)
    path = _write(tmp_path, base, stored, DEEPSEEK)
    with pytest.raises(WeightsError, match=says):
        _load(path)


def test_narrow_tensors_without_a_config_that_says_so_are_refused(base: Path, tmp_path: Path) -> None:
    for name in ("deepseek", "w8a8"):
        stored, _ = _tensors(base, FORMATS[name])
        with pytest.raises(
            WeightsError, match=r"_proj\.weight is stored as (F8_E4M3|I8); F32.* is expected, because config"
        ):
            _load(_write(tmp_path, base, stored, None))


def test_a_config_that_says_quantized_of_a_checkpoint_of_floats_is_refused(base: Path, tmp_path: Path) -> None:
    tensors = load_file(base / "model.safetensors")
    with pytest.raises(WeightsError, match=r"q_proj\.weight is stored as F32; I8 is expected, because config"):
        _load(_write(tmp_path, base, tensors, FORMATS["w8a8"].config))


def test_the_digest_covers_all_of_the_quantization_config(base: Path, tmp_path: Path) -> None:
    stored, _ = _tensors(base, FORMATS["deepseek"])
    changes = ({}, {"activation_scheme": "static"}, {"modules_to_not_convert": ["lm_head"]}, {"note": 1})
    digests = {_load(_write(tmp_path, base, stored, DEEPSEEK | change)).digest for change in changes}
    assert len(digests) == len(changes)


def test_random_weights_need_nothing_of_what_a_config_says_is_stored(base: Path, tmp_path: Path) -> None:
    path = _write(tmp_path, base, {"x": torch.zeros(1)}, FORMATS["w8a8"].config)
    loaded = load_model(resolve_model(str(path)), dtype=torch.float32, load_format="dummy")
    assert loaded.quantization == "int8"
    assert _logits(loaded).isfinite().all()
