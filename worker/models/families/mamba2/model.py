"""Mamba-2 (arXiv 2405.21060)."""

import torch

from kernels.attention.recurrent import RecurrentWeights
from kernels.backend import Backend
from worker.layers.linear import linear_shapes, load_linear
from worker.model_config import ModelConfig, RecurrenceConfig
from worker.models.decoder import Decoder, Layer
from worker.models.families.mamba2.mixer import Mixer
from worker.weights.reader import Shape, WeightReader

# What the recurrence reads, in its order; the first three are convolved.
_INPUTS = ("x", "b", "c", "z", "dt")
_CONVOLVED = _INPUTS[:3]


class Mamba2Model(Decoder):
    @classmethod
    def block(cls, config: ModelConfig, layer: int, reader: WeightReader, backend: Backend) -> Layer:
        prefix = f"model.layers.{layer}"
        return mamba2_mixer(config, layer, f"{prefix}.mixer", f"{prefix}.input_layernorm", reader, backend)

    @classmethod
    def block_shapes(cls, config: ModelConfig, layer: int) -> dict[str, Shape]:
        prefix = f"model.layers.{layer}"
        return {
            **mamba2_shapes(config, f"{prefix}.mixer"),
            f"{prefix}.input_layernorm.weight": (config.hidden_size,),
        }


def mamba2_mixer(
    config: ModelConfig, layer: int, prefix: str, norm: str, reader: WeightReader, backend: Backend
) -> Mixer:
    """Makes a layer. prefix, norm: names of its tensors, such as model.layers.3.mixer and
    model.layers.3.input_layernorm."""
    recurrence, shard = config.recurrence, backend.shard
    assert recurrence is not None
    parts = {kind: shard.of(size, "n_groups") for kind, size in _sizes(recurrence).items()}
    parts["heads"] = shard.of(recurrence.shape.num_heads, "n_groups")
    inputs = load_linear(
        reader,
        [f"{prefix}.{kind}_proj" for kind in _INPUTS],
        bias=recurrence.bias,
        backend=backend,
        norm=norm,
        eps=config.rms_norm_eps,
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
    return Mixer(config, layer, inputs, output, weights, backend)


def mamba2_shapes(config: ModelConfig, prefix: str) -> dict[str, Shape]:
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
