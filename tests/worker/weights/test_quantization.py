"""quantization_config of a config.json: the layers it applies to, and the settings that are refused."""

from typing import Any

import pytest

from worker.weights.quantization.methods import stored_quantization
from worker.weights.quantization.scaled import ScaledScheme

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
WEIGHTS = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
INPUTS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
GROUP = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": INPUTS}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {"group_0": GROUP},
}


def _layers_left_out(quantization: dict[str, Any], *layers: str) -> list[str]:
    stored = stored_quantization({"quantization_config": quantization})
    return [layer for layer in layers if stored.scheme_of(layer) is None]


@pytest.mark.parametrize(
    ("pattern", "left_out"),
    [
        ("model.layers.1.mlp.up_proj", ["model.layers.1.mlp.up_proj"]),
        ("model.layers.1", ["model.layers.1.mlp.up_proj"]),
        ("up_proj", ["model.layers.1.mlp.up_proj", "model.layers.11.mlp.up_proj"]),
        ("re:.*layers\\.1\\d\\..*", ["model.layers.11.mlp.up_proj"]),
        ("proj", []),
        ("Linear", []),
    ],
)
def test_layers_are_left_out_by_name_by_module_by_short_name_and_by_regular_expression(
    pattern: str, left_out: list[str]
) -> None:
    layers = ("model.layers.1.mlp.up_proj", "model.layers.11.mlp.up_proj")
    assert _layers_left_out(COMPRESSED | {"ignore": [pattern]}, *layers) == left_out
    for name in ("modules_to_not_convert", "ignored_layers"):
        assert _layers_left_out(FP8 | {name: [pattern]}, *layers) == left_out


def test_fp8_leaves_the_head_out_though_it_does_not_say_so() -> None:
    assert _layers_left_out(FP8, "lm_head", "model.layers.0.mlp.up_proj") == ["lm_head"]
    assert _layers_left_out(COMPRESSED, "lm_head") == []


def test_groups_have_schemes_of_their_own_and_untargeted_layers_are_floats() -> None:
    floats = {"targets": ["re:.*mlp.*"], "weights": WEIGHTS | {"type": "float", "strategy": "tensor"}}
    groups = {"group_0": GROUP | {"targets": ["re:.*self_attn.*"]}, "group_1": floats}
    stored = stored_quantization({"quantization_config": COMPRESSED | {"config_groups": groups, "format": None}})
    attention, mlp = stored.scheme_of("model.layers.0.self_attn.q_proj"), stored.scheme_of("model.layers.0.mlp.up_proj")
    assert isinstance(attention, ScaledScheme)
    assert isinstance(mlp, ScaledScheme)
    assert (attention.kind, mlp.kind) == ("I8", "F8_E4M3")
    assert stored.scheme_of("lm_head") is None
    assert stored.made_for == "none", "only some layers are made for 8-bit inputs"


def test_no_quantization_and_the_older_key() -> None:
    assert stored_quantization({}).scheme_of("model.layers.0.mlp.up_proj") is None
    assert stored_quantization({"compression_config": COMPRESSED}).made_for == "int8"


def _group(**changes: Any) -> dict[str, Any]:
    return COMPRESSED | {"config_groups": {"group_0": GROUP | {"weights": WEIGHTS | changes}}}


@pytest.mark.parametrize(
    ("quantization", "says"),
    [
        ({"quant_method": "hqq", "bits": 4}, r"quant_method='hqq' is not supported; fp8, fbgemm_fp8, compr"),
        ({"bits": 4}, r"quant_method=None is not supported"),
        ([1], r"quant_method=None is not supported"),
        ({"quant_method": ["fp8"]}, r"quant_method=\['fp8'\] is not supported"),
        (FP8 | {"fmt": "e5m2"}, r"\(fp8\): fmt='e5m2' is not supported; e4m3 is"),
        (FP8 | {"weight_block_size": [0, 128]}, r"weight_block_size=\[0, 128\] must be positive"),
        (FP8 | {"weight_block_size": "128"}, r"Expected `array | null`, got `str` - at `\$\.weight_block_size`"),
        (COMPRESSED | {"format": "marlin-24"}, r"format='marlin-24' is not supported; float-quantized"),
        (COMPRESSED | {"config_groups": None}, r"\(compressed-tensors\): Expected `object`, got `null`"),
        (COMPRESSED | {"transform_config": {"config_groups": {"v": {}}}}, r"rotated weights are not supported"),
        (COMPRESSED | {"ignore": ["re:("]}, r"'re:\(' is not a regular expression"),
        (_group(num_bits=4), r"config_groups\.group_0: int weights of 4 bits are not supported"),
        (_group(symmetric=False), r"asymmetric weights are not supported; symmetric ones are"),
        (_group(strategy="group"), r"strategy='group' of int weights is not supported; tensor, channel are"),
        (_group(strategy="block"), r"strategy='block' of int weights is not supported; tensor, channel are"),
        (_group(type="float", block_structure=[-1, 2], strategy="block"), r"block_structure=\[-1, 2\] must be"),
    ],
)
def test_what_is_not_supported_is_named_with_what_is(quantization: Any, says: str) -> None:
    with pytest.raises(ValueError, match=rf"quantization_config.*{says}"):
        stored_quantization({"quantization_config": quantization})
