"""gpt-oss (arXiv 2508.10925): attention with sinks, a window on every other layer, and mixtures whose router and
experts have biases. Files store all experts of a layer in one tensor: in floats, or in MXFP4.

Legend: N experts, H hidden size, I intermediate size, G blocks of 32 inputs.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kernels.elementwise.silu_mul.torch_cpu import SWIGLU_ALPHA, SWIGLU_LIMIT
from worker.layers.experts.mixture import ExpertNames
from worker.model_config import ExpertsConfig, ModelConfig
from worker.models.decoder import Decoder
from worker.models.families.mixtral import MixtureBlock
from worker.models.family import Family, GgufFamily, experts_from_gguf
from worker.models.rope import rope_from_config_json
from worker.models.windows import alternating_windows
from worker.weights.reader import Shape, WeightsError
from worker.weights.safetensors_files import SafetensorsFiles


class GptOssBlock(MixtureBlock):
    """x = x + attention(norm(x)); x = x + mixture(norm(x))."""

    names = ExpertNames(router="router")


class GptOssModel(Decoder):
    block = GptOssBlock


# Every other layer has a window, the first one, too.
_PERIOD, _THETA = 2, 150000.0


def gpt_oss_fields(raw: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    for name, expected in (("swiglu_alpha", SWIGLU_ALPHA), ("swiglu_limit", SWIGLU_LIMIT)):
        if float(raw.get(name, expected)) != expected:
            raise ValueError(f"{name}={raw[name]!r} is not supported; {expected} is, as in all published models")
    size = int(raw["intermediate_size"])
    experts = ExpertsConfig(
        num_experts=int(raw["num_local_experts"]),
        num_experts_per_token=int(raw.get("num_experts_per_tok") or raw["experts_per_token"]),
        intermediate_size=size,
        # A softmax over the chosen experts is one over all, divided by the sum of the chosen.
        renormalize=True,
        layers=(True,) * num_layers,
        has_linear_biases=True,
        activation="clamped_swiglu",
    )
    has_biases = bool(raw.get("attention_bias", True))
    return {
        "rope": rope_from_config_json({"rope_theta": _THETA, **raw}),
        "layer_windows": alternating_windows(raw, num_layers, period=_PERIOD),
        "qkv_bias": has_biases,
        "attention_output_bias": has_biases,
        "has_sinks": True,
        "experts": experts,
    }


def gpt_oss_from_gguf(config: ModelConfig, get: Any) -> ModelConfig:
    experts = replace(
        experts_from_gguf(config, get, renormalize=True), has_linear_biases=True, activation="clamped_swiglu"
    )
    window = {"sliding_window": get("attention.sliding_window")}
    return replace(
        config,
        # Files don't say that the limits of YaRN are not rounded, as config.json does.
        rope=replace(config.rope, truncate=False),
        layer_windows=alternating_windows(window, config.num_layers, period=_PERIOD),
        has_sinks=True,
        experts=experts,
    )


# In floats [N, H, 2I] and [N, I, H]; in MXFP4 _blocks [N, outputs, G, 16] and _scales [N, outputs, G]. Biases: [N, 2I]
# and [N, H]. Of gate_up_proj's outputs, even ones are the gate's, odd ones up's.
_EXPERTS = ".experts."
_FUSED, _DOWN = "gate_up_proj", "down_proj"
_BLOCKS, _SCALES, _BIAS = "_blocks", "_scales", "_bias"
_DIMS = {"": 3, _BLOCKS: 4, _SCALES: 3, _BIAS: 2}
_BLOCK_BYTES = 16


class _Part(NamedTuple):
    """The place of an expert's tensor in a stored one."""

    stored: str
    expert: int
    # Rows of the layer among the stored outputs.
    outputs: slice
    kind: str  # "", _BLOCKS, _SCALES or _BIAS


class GptOssFiles(SafetensorsFiles):
    """Presents each expert's weights and biases separately, as linear layers read them; in MXFP4, its blocks and its
    scales. Only the rows that are read are ever in memory."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._parts: dict[str, _Part] = {}
        stored_shapes, dtypes = self.shapes, self.dtypes
        self.shapes, self.dtypes = {}, {}
        for stored, shape in stored_shapes.items():
            layer, found, name = stored.partition(_EXPERTS)
            projection = next((each for each in (_FUSED, _DOWN) if found and name.startswith(each)), None)
            if projection is None:
                self.shapes[stored], self.dtypes[stored] = shape, dtypes[stored]
                continue
            kind = name.removeprefix(projection)
            if len(shape) != _DIMS.get(kind):
                raise WeightsError(f"{self.path}: {stored} of shape {list(shape)} is no tensor of gpt-oss's experts")
            self._add(f"{layer}{_EXPERTS}", projection, _Part(stored, 0, slice(0), kind), shape, dtypes[stored])
            if kind == _BLOCKS:
                self._check_scales(stored, shape, stored_shapes, dtypes)

    def stored_name(self, name: str) -> str:
        return self._parts[name].stored if name in self._parts else name

    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        part = self._parts.get(name)
        if part is None:
            return self._read_rows(name, rows)
        outputs, expert = part.outputs, part.expert
        if rows is not None:
            step = outputs.step
            outputs = slice(
                outputs.start + rows.start * step, min(outputs.start + rows.stop * step, outputs.stop), step
            )
        # A safetensors slice has no step: the numbers between are read, too.
        span, every = slice(outputs.start, outputs.stop), slice(None, None, outputs.step)
        if part.kind:
            return self._read(part.stored, lambda file, stored: file.get_slice(stored)[expert, span])[every].clone()
        inputs_first = self._read(part.stored, lambda file, stored: file.get_slice(stored)[expert, :, span])
        return inputs_first[:, every].t().contiguous()

    def _add(self, prefix: str, projection: str, part: _Part, shape: Shape, dtype: str) -> None:
        """Adds the tensors of all experts that a stored tensor holds."""
        # A weight in floats has its inputs first.
        outputs, others = (shape[1], shape[2:]) if part.kind else (shape[2], shape[1:2])
        layers = {_DOWN: slice(0, outputs, 1)}
        if projection == _FUSED:
            layers = {"gate_proj": slice(0, outputs, 2), "up_proj": slice(1, outputs, 2)}
        for expert in range(shape[0]):
            for layer, places in layers.items():
                name = f"{prefix}{expert}.{layer}.{part.kind.removeprefix('_') or 'weight'}"
                self._parts[name] = part._replace(expert=expert, outputs=places)
                self.shapes[name] = (len(range(*places.indices(outputs))), *others)
                self.dtypes[name] = dtype

    def _check_scales(self, blocks: str, shape: Shape, shapes: dict[str, Shape], dtypes: dict[str, str]) -> None:
        scales = blocks.removesuffix(_BLOCKS) + _SCALES
        if shapes.get(scales) != shape[:-1] or (dtypes[blocks], dtypes[scales]) != ("U8", "U8"):
            found = f"{dtypes[scales]} {list(shapes[scales])}" if scales in shapes else "missing"
            raise WeightsError(
                f"{self.path}: {scales} is {found}; U8 {list(shape[:-1])} is expected beside {blocks}, U8 {list(shape)}"
            )
        if shape[-1] != _BLOCK_BYTES:
            raise WeightsError(
                f"{self.path}: {blocks} of shape {list(shape)}: blocks of {_BLOCK_BYTES} bytes are expected"
            )


GPT_OSS = Family(
    architectures=("GptOssForCausalLM",),
    model=GptOssModel,
    fields=gpt_oss_fields,
    open_files=GptOssFiles,
    gguf=GgufFamily(
        name="gpt-oss",
        architecture="GptOssForCausalLM",
        layer_names={
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
            "ffn_gate_exps": "mlp.experts.{}.gate_proj",
            "ffn_up_exps": "mlp.experts.{}.up_proj",
            "ffn_down_exps": "mlp.experts.{}.down_proj",
        },
        complete=gpt_oss_from_gguf,
    ),
)
