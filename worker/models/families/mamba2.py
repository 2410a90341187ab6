"""Mamba-2 (arXiv 2405.21060): layers that carry a state from token to token, without attention and without an MLP."""

from collections.abc import Mapping
from typing import Any

import torch

from kernels.attention.recurrent import RecurrentWeights
from kernels.attention.recurrent.shape import RecurrentShape
from kernels.backend import Backend
from worker.layers.linear import linear_shapes, load_linear
from worker.layers.mixer import Mixer
from worker.layers.residual import InputNorm, ResidualStream, norm_shapes
from worker.model_config import NO_ROPE, ModelConfig, RecurrenceConfig
from worker.models.decoder import Block, Decoder
from worker.models.family import Family
from worker.weights.fused_files import FusedFiles
from worker.weights.reader import Shape, WeightReader

# The inputs of the recurrence, in its order; the first three are convolved.
_INPUTS = ("x", "b", "c", "z", "dt")
_CONVOLVED = _INPUTS[:3]


class Mamba2Block(Block):
    def __init__(self, config: ModelConfig, layer: int, prefix: str, reader: WeightReader, backend: Backend) -> None:
        self.norm = InputNorm(f"{prefix}.input_layernorm", config.rms_norm_eps)
        self.mixer = _mixer(config, layer, f"{prefix}.mixer", self.norm, reader, backend)

    def forward(self, x: ResidualStream) -> ResidualStream:
        return x + self.mixer(self.norm(x))

    @classmethod
    def shapes(cls, config: ModelConfig, layer: int, prefix: str) -> dict[str, Shape]:
        return _shapes(config, f"{prefix}.mixer") | norm_shapes(prefix, config.hidden_size, "input_layernorm")


class Mamba2Model(Decoder):
    block = Mamba2Block


def _mixer(
    config: ModelConfig, layer: int, prefix: str, norm: InputNorm, reader: WeightReader, backend: Backend
) -> Mixer:
    """Makes a layer. prefix: of its tensors, such as model.layers.3.mixer."""
    recurrence, shard = config.recurrence, backend.shard
    assert recurrence is not None
    parts = {kind: shard.of(size, "n_groups") for kind, size in _sizes(recurrence).items()}
    parts["heads"] = shard.of(recurrence.shape.num_heads, "n_groups")
    inputs = load_linear(
        reader,
        [f"{prefix}.{kind}_proj" for kind in _INPUTS],
        bias=recurrence.bias,
        backend=backend,
        norm=norm.name,
        eps=norm.eps,
        outputs=lambda name: parts[name.rpartition(".")[2].removesuffix("_proj")],
    )
    output = load_linear(reader, [f"{prefix}.out_proj"], bias=recurrence.bias, backend=backend, inputs=parts["x"])

    def convolved(kind: str) -> torch.Tensor:
        names = [f"{prefix}.{part}_conv.{kind}" for part in _CONVOLVED]
        return torch.cat([reader.float32(name)[parts[part]] for name, part in zip(names, _CONVOLVED, strict=True)])

    weights = RecurrentWeights(
        taps_WC=convolved("weight").squeeze(1).T.contiguous(),
        bias_C=convolved("bias") if recurrence.conv_bias else None,
        rate_H=-reader.float32(f"{prefix}.A_log").exp()[parts["heads"]],
        step_bias_H=reader.float32(f"{prefix}.dt_bias")[parts["heads"]],
        skip_H=reader.float32(f"{prefix}.D")[parts["heads"]],
        norm=reader.float32(f"{prefix}.norm.weight")[parts["x"]],
        eps=config.rms_norm_eps,
        steps=recurrence.steps,
    )
    return Mixer(config, layer, norm, inputs, output, weights, backend)


def _shapes(config: ModelConfig, prefix: str) -> dict[str, Shape]:
    """Returns the shapes of the tensors under the prefix, by name."""
    recurrence = config.recurrence
    assert recurrence is not None
    sizes, shape = _sizes(recurrence), recurrence.shape
    linears = {f"{kind}_proj": (config.hidden_size, sizes[kind]) for kind in _INPUTS}
    linears["out_proj"] = (shape.results, config.hidden_size)
    shapes = linear_shapes(prefix, linears, bias=linears if recurrence.bias else ())
    for kind in _CONVOLVED:
        shapes[f"{prefix}.{kind}_conv.weight"] = (sizes[kind], 1, shape.num_taps)
        if recurrence.conv_bias:
            shapes[f"{prefix}.{kind}_conv.bias"] = (sizes[kind],)
    heads = {f"{prefix}.{name}": (shape.num_heads,) for name in ("A_log", "D", "dt_bias")}
    return {**shapes, **heads, f"{prefix}.norm.weight": (shape.results,)}


def _sizes(recurrence: RecurrenceConfig) -> dict[str, int]:
    shape = recurrence.shape
    return {"x": shape.results, "b": shape.keys, "c": shape.keys, "z": shape.results, "dt": shape.num_heads}


# A model without attention has no longest context; this bounds the tables of a sequence.
_LONGEST_CONTEXT = 2**20


def with_common_names(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Adds what all other models have: no layer has attention or an MLP."""
    return {
        **raw,
        "num_attention_heads": int(raw["num_heads"]),
        "intermediate_size": int(raw["hidden_size"] * raw.get("expand", 2)),
        "rms_norm_eps": float(raw.get("layer_norm_epsilon", 1e-5)),
        "max_position_embeddings": int(raw.get("max_position_embeddings") or _LONGEST_CONTEXT),
    }


def mamba2_fields(raw: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    num_heads, head_dim, width = int(raw["num_heads"]), int(raw["head_dim"]), int(raw["intermediate_size"])
    if num_heads * head_dim != width:
        raise ValueError(
            f"num_heads={num_heads} of head_dim={head_dim} do not make hidden_size * expand = {width} numbers"
        )
    num_groups, (least, most) = int(raw.get("n_groups", 8)), raw.get("time_step_limit", (0.0, float("inf")))
    shape = RecurrentShape(
        rule="mamba2",
        num_heads=num_heads,
        num_groups=num_groups,
        key_size=int(raw["state_size"]),
        value_size=head_dim,
        num_taps=int(raw.get("conv_kernel", 4)),
        norm_size=width // max(1, num_groups),
    )
    return {
        "rope": NO_ROPE,
        "layer_windows": (0,) * num_layers,
        # Attention's sizes, which no layer reads.
        "num_kv_heads": num_heads,
        "head_size": 8,
        "recurrence": RecurrenceConfig(
            shape=shape,
            layers=(True,) * num_layers,
            steps=(_number(least), _number(most)),
            bias=bool(raw.get("use_bias", False)),
            conv_bias=bool(raw.get("use_conv_bias", True)),
        ),
    }


def _number(value: Any) -> float:
    """A number; transformers writes infinity, which JSON lacks, as an object."""
    return float(value["__float__"] if isinstance(value, Mapping) else value)


_NAMES = {
    "backbone.embeddings.weight": "model.embed_tokens.weight",
    "backbone.embedding.weight": "model.embed_tokens.weight",
    "backbone.norm_f.weight": "model.norm.weight",
}
_LAYER, _MIXER = "backbone.layers.", ".mixer."


class Mamba2Files(FusedFiles):
    """Presents the input projection and the convolution as layers of their own: gates z, values x, keys b, queries c,
    steps dt."""

    def _layers(self, stored: str, shapes: dict[str, Shape]) -> dict[str, int] | None:
        num_rows = (*shapes[stored], 1)[0]
        if stored in _NAMES:
            return {_NAMES[stored]: num_rows}
        if not stored.startswith(_LAYER):
            return None
        name = f"model.layers.{stored.removeprefix(_LAYER)}"
        prefix, _, tensor = name.partition(_MIXER)
        if not tensor:
            return {name.replace(".norm.", ".input_layernorm."): num_rows}
        kind = tensor.rpartition(".")[2]
        parts = self._parts_of(tensor, f"{stored.partition(_MIXER)[0]}{_MIXER}", shapes)
        return {f"{prefix}{_MIXER}{part}.{kind}": rows for part, rows in parts.items()} or {name: num_rows}

    def _parts_of(self, tensor: str, prefix: str, shapes: dict[str, Shape]) -> dict[str, int]:
        """Returns the layers that a stored one consists of, and their outputs; empty: it is one layer."""
        values, steps = (shapes.get(f"{prefix}{name}", (0,))[0] for name in ("norm.weight", "A_log"))
        channels = shapes.get(f"{prefix}conv1d.weight", (0,))[0]
        keys = (channels - values) // 2
        if tensor.startswith("in_proj."):
            return {"z_proj": values, "x_proj": values, "b_proj": keys, "c_proj": keys, "dt_proj": steps}
        if tensor.startswith("conv1d."):
            return {"x_conv": values, "b_conv": keys, "c_conv": keys}
        return {}


MAMBA2 = Family(
    architectures=("Mamba2ForCausalLM",),
    model=Mamba2Model,
    fields=mamba2_fields,
    text_config=with_common_names,
    open_files=Mamba2Files,
)
