"""Qwen3-Next: layers with the gated delta rule (arXiv 2412.06464), and layers with gated attention."""

import torch

from kernels.attention.recurrent import RecurrentShape, RecurrentWeights
from kernels.backend import Backend
from worker.layers.attention import Attention
from worker.layers.experts.mixture import ExpertNames, mlp_or_mixture, mlp_or_mixture_shapes
from worker.layers.linear import linear_shapes, load_linear
from worker.model_config import ModelConfig
from worker.models.decoder import Block, Decoder
from worker.models.families.gemma3.checkpoint import NormsPlusOne
from worker.models.families.mamba2.mixer import Mixer
from worker.weights.reader import Shape, WeightReader

_NAMES = ExpertNames(shared="shared_expert")


class Qwen3NextModel(Decoder):
    @classmethod
    def adapted(cls, config: ModelConfig, reader: WeightReader) -> WeightReader:
        return NormsPlusOne(reader)

    @classmethod
    def block(cls, config: ModelConfig, layer: int, reader: WeightReader, backend: Backend) -> Block:
        prefix = f"model.layers.{layer}"
        norm = f"{prefix}.input_layernorm"
        return Block(
            _delta_mixer(config, layer, f"{prefix}.linear_attn", norm, reader, backend)
            if config.has_state(layer)
            else Attention(config, layer, f"{prefix}.self_attn", norm=norm, reader=reader, backend=backend),
            mlp_or_mixture(
                config, layer, f"{prefix}.mlp", f"{prefix}.post_attention_layernorm", _NAMES, reader, backend
            ),
        )

    @classmethod
    def block_shapes(cls, config: ModelConfig, layer: int) -> dict[str, Shape]:
        prefix = f"model.layers.{layer}"
        return {
            **(
                _delta_shapes(config, f"{prefix}.linear_attn")
                if config.has_state(layer)
                else Attention.shapes(config, f"{prefix}.self_attn")
            ),
            **mlp_or_mixture_shapes(config, layer, f"{prefix}.mlp", _NAMES),
            f"{prefix}.input_layernorm.weight": (config.hidden_size,),
            f"{prefix}.post_attention_layernorm.weight": (config.hidden_size,),
        }


def _delta_mixer(
    config: ModelConfig, layer: int, prefix: str, norm: str, reader: WeightReader, backend: Backend
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

    names = [f"{prefix}.in_proj_qkvz", f"{prefix}.in_proj_ba"]
    inputs = load_linear(
        reader, names, bias=False, backend=backend, norm=norm, eps=config.rms_norm_eps, reorder=in_order, outputs=part
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
    return Mixer(config, layer, inputs, output, weights, backend)


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


_INPUTS = ("in_proj_qkvz", "in_proj_ba")
