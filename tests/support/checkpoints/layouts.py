"""Whole checkpoints in each packed layout, made from a checkpoint of floats."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints.codes import four_bits, llm_int8, mxfp4
from tests.support.checkpoints.integers import Tensors, awq, gptq, pack_quantized
from worker.weights.quantization.kinds import Quantization

# Writes a layer's weight; returns tensors, and the floats that its library makes of them.
Write = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]


@dataclass(frozen=True)
class Layout:
    """config: quantization_config. auto: what quantization=auto is on a CPU."""

    config: Mapping[str, Any]
    write: Write
    auto: Quantization


def _gptq(bits: int, group_size: int, **how: Any) -> Layout:
    act_order, zero_offset = how.get("act_order", False), how.get("zero_offset", 1)
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "desc_act": act_order,
        "sym": how.get("symmetric", True),
        "checkpoint_format": "gptq" if zero_offset else "gptq_v2",
    }
    kept: Quantization = "int4" if bits == 4 else "int8"
    write = partial(gptq, bits=bits, group_size=group_size, **how)
    return Layout(config, write, "none" if act_order else kept)


def _awq(group_size: int) -> Layout:
    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm"}
    return Layout(config, partial(awq, group_size=group_size), "int4")


def _compressed(bits: int, group_size: int, **how: Any) -> Layout:
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": how.get("symmetric", True),
        "dynamic": False,
        "strategy": "channel" if group_size == -1 else "group",
        "group_size": None if group_size == -1 else group_size,
        "actorder": "group" if how.get("act_order") else None,
        "observer": "minmax",
    }
    kept: Quantization = "int4" if bits == 4 else "int8"
    write = partial(pack_quantized, bits=bits, group_size=group_size, **how)
    return Layout(_compressed_config("pack-quantized", weights), write, "none" if how.get("act_order") else kept)


def _compressed_config(stored_format: str, weights: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": stored_format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def _bitsandbytes(kind: str, *, nested: bool) -> Layout:
    config = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": nested,
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": None,
    }
    return Layout(config, partial(four_bits, kind=kind, nested=nested), "none")


def _mxfp4_packed(layer: str, weight_OI: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    blocks, scales, floats = mxfp4(weight_OI)
    return {f"{layer}.weight_packed": blocks.flatten(1), f"{layer}.weight_scale": scales}, floats


LAYOUTS = {
    "awq-32": _awq(32),
    "awq-64": _awq(64),
    "awq-128": _awq(128),
    "gptq-4-128": _gptq(4, 128),
    "gptq-4-64-asymmetric": _gptq(4, 64, symmetric=False),
    "gptq-4-32-v2": _gptq(4, 32, symmetric=False, zero_offset=0, has_groups=False),
    "gptq-4-channel": _gptq(4, -1),
    "gptq-4-64-act-order": _gptq(4, 64, symmetric=False, act_order=True),
    "gptq-8-128": _gptq(8, 128),
    "w4a16-128": _compressed(4, 128),
    "w4a16-32-asymmetric": _compressed(4, 32, symmetric=False),
    "w4a16-channel": _compressed(4, -1, dtype=torch.float16),
    "w4a16-64-act-order": _compressed(4, 64, act_order=True),
    "w8a16-channel": _compressed(8, -1),
    "w8a16-64": _compressed(8, 64, dtype=torch.float16),
    "w8a16-128-asymmetric": _compressed(8, 128, symmetric=False),
    "nf4": _bitsandbytes("nf4", nested=False),
    "nf4-double": _bitsandbytes("nf4", nested=True),
    "fp4": _bitsandbytes("fp4", nested=False),
    "llm-int8": Layout(
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}, llm_int8, "int8"
    ),
    "mxfp4-packed": Layout(
        _compressed_config(
            "mxfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True},
        ),
        _mxfp4_packed,
        "none",
    ),
}


def layout_tensors(base: Path, layout: Layout) -> tuple[Tensors, Tensors]:
    """The tensors of a checkpoint whose projections are in a layout, and the floats that its library makes of them."""
    stored: Tensors = {}
    floats: Tensors = {}
    for name, weight in load_file(base / "model.safetensors").items():
        if "_proj.weight" not in name:
            stored[name] = floats[name] = weight
            continue
        tensors, floats[name] = layout.write(name.removesuffix(".weight"), weight)
        stored |= tensors
    return stored, floats


def write_checkpoint(path: Path, base: Path, tensors: Tensors, quantization: Mapping[str, Any] | None) -> Path:
    """Writes tensors beside the config.json of a checkpoint of floats."""
    path.mkdir(exist_ok=True, parents=True)
    config = json.loads((base / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    return path
