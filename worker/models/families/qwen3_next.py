"""Qwen3-Next: layers that carry a state by the gated delta rule (arXiv 2412.06464), layers with gated attention, and
mixtures of experts in both."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from kernels.attention.recurrent import RecurrentShape, RecurrentWeights
from kernels.backend import Backend
from worker.layers.attention import Attention
from worker.layers.experts.mixture import ExpertNames, mlp_or_mixture, mlp_or_mixture_shapes
from worker.layers.linear import linear_shapes, load_linear
from worker.layers.mixer import Mixer
from worker.layers.residual import InputNorm, ResidualStream, norm_shapes
from worker.model_config import ModelConfig, RecurrenceConfig
from worker.models.decoder import Block, Decoder
from worker.models.families.mixtral import qwen_experts
from worker.models.family import Family
from worker.models.rope import rope_dims, rope_from_config_json
from worker.weights.reader import Shape, WeightReader

_NAMES = ExpertNames(shared="shared_expert")
_MIXER_NORM, _MLP_NORM = "input_layernorm", "post_attention_layernorm"
_INPUTS = ("in_proj_qkvz", "in_proj_ba")


class Qwen3NextBlock(Block):
    """The mixer is attention, or the delta rule in layers with a state."""

    def __init__(self, config: ModelConfig, layer: int, prefix: str, reader: WeightReader, backend: Backend) -> None:
        self.mixer_norm = norm = InputNorm(f"{prefix}.{_MIXER_NORM}", config.rms_norm_eps)
        if config.has_state(layer):
            self.mixer = _delta_mixer(config, layer, f"{prefix}.linear_attn", norm, reader, backend)
        else:
            self.mixer = Attention(config, layer, f"{prefix}.self_attn", norm, reader, backend)
        self.mlp_norm = InputNorm(f"{prefix}.{_MLP_NORM}", config.rms_norm_eps)
        self.mlp = mlp_or_mixture(config, layer, f"{prefix}.mlp", self.mlp_norm, _NAMES, reader, backend)

    def forward(self, x: ResidualStream) -> ResidualStream:
        x = x + self.mixer(self.mixer_norm(x))
        return x + self.mlp(self.mlp_norm(x))

    @classmethod
    def shapes(cls, config: ModelConfig, layer: int, prefix: str) -> dict[str, Shape]:
        if config.has_state(layer):
            of_mixer = _delta_shapes(config, f"{prefix}.linear_attn")
        else:
            of_mixer = Attention.shapes(config, f"{prefix}.self_attn")
        return {
            **of_mixer,
            **mlp_or_mixture_shapes(config, layer, f"{prefix}.mlp", _NAMES),
            **norm_shapes(prefix, config.hidden_size, _MIXER_NORM, _MLP_NORM),
        }


class Qwen3NextModel(Decoder):
    block = Qwen3NextBlock


def _delta_mixer(
    config: ModelConfig, layer: int, prefix: str, norm: InputNorm, reader: WeightReader, backend: Backend
) -> Mixer:
    assert config.recurrence is not None
    shape = config.recurrence.shape
    groups = backend.shard.of(shape.num_groups, "linear_num_key_heads")
    per_group = shape.num_heads // shape.num_groups
    heads = slice(groups.start * per_group, groups.stop * per_group)
    values = slice(heads.start * shape.value_size, heads.stop * shape.value_size)
    keys = slice(groups.start * shape.key_size, groups.stop * shape.key_size)

    def part(name: str) -> slice:
        rows = sum(_group_sizes(shape, name))
        return slice(groups.start * rows, groups.stop * rows)

    def in_order(name: str, rows: torch.Tensor) -> torch.Tensor:
        """Puts what a file stores group by group in the order of the recurrence."""
        parts = rows.unflatten(0, (-1, sum(_group_sizes(shape, name)))).split(_group_sizes(shape, name), dim=1)
        # q, k, v, z become v, k, q, z; b, a become a, b.
        order = (2, 1, 0, 3) if len(parts) == 4 else (1, 0)
        return torch.cat([parts[i].flatten(0, 1) for i in order])

    names = [f"{prefix}.{name}" for name in _INPUTS]
    inputs = load_linear(
        reader, names, bias=False, backend=backend, norm=norm.name, eps=norm.eps, reorder=in_order, outputs=part
    )
    output = load_linear(reader, [f"{prefix}.out_proj"], bias=False, backend=backend, inputs=values)
    q, k, v = reader.float32(f"{prefix}.conv1d.weight").squeeze(1).split([shape.keys, shape.keys, shape.results])
    weights = RecurrentWeights(
        taps_WC=torch.cat((v[values], k[keys], q[keys])).T.contiguous(),
        bias_C=None,
        rate_H=-reader.float32(f"{prefix}.A_log").exp()[heads],
        step_bias_H=reader.float32(f"{prefix}.dt_bias")[heads],
        skip_H=None,
        # All heads share one norm.
        norm=reader.float32(f"{prefix}.norm.weight").repeat(heads.stop - heads.start),
        eps=config.rms_norm_eps,
        steps=config.recurrence.steps,
    )
    return Mixer(config, layer, norm, inputs, output, weights, backend)


def _group_sizes(shape: RecurrentShape, name: str) -> list[int]:
    """Returns the outputs of a group of heads, part by part, as files store them: q, k, v and z, or b and a."""
    per_group = shape.num_heads // shape.num_groups
    if name.endswith("_ba"):
        return [per_group, per_group]
    values = per_group * shape.value_size
    return [shape.key_size, shape.key_size, values, values]


def _delta_shapes(config: ModelConfig, prefix: str) -> dict[str, Shape]:
    assert config.recurrence is not None
    shape, hidden_size = config.recurrence.shape, config.hidden_size
    linears = {name: (hidden_size, shape.num_groups * sum(_group_sizes(shape, name))) for name in _INPUTS}
    linears["out_proj"] = (shape.results, hidden_size)
    return {
        **linear_shapes(prefix, linears),
        f"{prefix}.conv1d.weight": (shape.channels, 1, shape.num_taps),
        f"{prefix}.A_log": (shape.num_heads,),
        f"{prefix}.dt_bias": (shape.num_heads,),
        f"{prefix}.norm.weight": (shape.value_size,),
    }


# Rope rotates a quarter of each head, and every fourth layer has attention, in files that don't say.
_PARTIAL_ROTARY_FACTOR, _INTERVAL = 0.25, 4
_STATE, _ATTENTION = "linear_attention", "full_attention"


def qwen3_next_fields(raw: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    value_size = int(raw.get("linear_value_head_dim", 128))
    shape = RecurrentShape(
        rule="delta",
        num_heads=int(raw.get("linear_num_value_heads", 32)),
        num_groups=int(raw.get("linear_num_key_heads", 16)),
        key_size=int(raw.get("linear_key_head_dim", 128)),
        value_size=value_size,
        num_taps=int(raw.get("linear_conv_kernel_dim", 4)),
        norm_size=value_size,
    )
    return {
        "rope": rope_from_config_json(raw, is_partial=True),
        "rope_dims": rope_dims(raw, default=_PARTIAL_ROTARY_FACTOR),
        "layer_windows": (0,) * num_layers,
        "qk_norm": True,
        "norms_lack_one": True,
        "attention_gate": True,
        "recurrence": RecurrenceConfig(shape=shape, layers=_layers_with_state(raw, num_layers)),
        "experts": replace(
            qwen_experts(raw, num_layers),
            renormalize=bool(raw.get("norm_topk_prob", True)),
            shared_intermediate_size=int(raw["shared_expert_intermediate_size"]),
            has_shared_gate=True,
        ),
        # The layers for multi-token prediction.
        "left_out": ("mtp.",),
    }


def _layers_with_state(raw: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    types = raw.get("layer_types")
    if types is None:
        interval = int(raw.get("full_attention_interval") or _INTERVAL)
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    unknown = sorted({str(kind) for kind in types} - {_STATE, _ATTENTION})
    if unknown or len(types) != num_layers:
        raise ValueError(
            f"layer_types has {len(types)} entries, {', '.join(unknown) or 'all known'}, for {num_layers} layers: each "
            f"is {_STATE} or {_ATTENTION}"
        )
    return tuple(kind == _STATE for kind in types)


QWEN3_NEXT = Family(architectures=("Qwen3NextForCausalLM",), model=Qwen3NextModel, fields=qwen3_next_fields)
