"""Llama 4's text models (meta-llama/llama-models, models/llama4; the model cards of Scout and Maverick).

iRoPE: three of four layers have rope, norms of each head without weights, and attention within chunks of positions;
every fourth has full attention, no rope, and queries that grow with their position. Some layers, or all, have a mixture
in place of the MLP: a token's experts are those with the largest logits, each expert's input is the token times the
sigmoid of its logit, and the sum of their results is added to that of a shared expert.

Files may also hold a vision model, and may store all experts in one tensor.

Legend: N experts, H hidden size, I intermediate size.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from worker.layers.experts.mixture import ExpertNames
from worker.model_config import ExpertsConfig, TemperatureConfig
from worker.models.decoder import Decoder
from worker.models.families.mixtral import MixtureBlock
from worker.models.family import Family
from worker.models.rope import rope_from_config_json, rope_layers
from worker.models.windows import sizes_by_type
from worker.weights.safetensors_files import SafetensorsFiles


class Llama4Block(MixtureBlock):
    """x = x + attention(norm(x)); x = x + feed_forward(norm(x)), in some layers with a mixture."""

    mlp_name = "feed_forward"
    names = ExpertNames(router="router", shared="shared_expert")


class Llama4Model(Decoder):
    block = Llama4Block


# Prefixes of tensors that only images pass through.
_VISION = ("vision_model.", "multi_modal_projector.")
# Defaults for fields that a file leaves out.
_CHUNK, _FLOOR_SCALE, _ATTENTION_SCALE = 8192, 8192, 0.1


def llama4_text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the part of config.json that describes the text model, including `architectures`."""
    return raw | raw["text_config"] | {"architectures": raw["architectures"]} if "text_config" in raw else raw


def llama4_fields(raw: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    rope, has_rope = rope_from_config_json(raw), rope_layers(raw, num_layers)
    norms_heads = bool(raw.get("use_qk_norm", True))
    if norms_heads and rope.attention_factor != 1:
        raise ValueError(
            f"rope_type={rope.scaling!r} with use_qk_norm is not supported: it scales heads, but they are normed after "
            "rope; default, linear and llama3 are"
        )
    temperature = None
    if raw.get("attn_temperature_tuning", True):
        temperature = TemperatureConfig(
            scale=float(raw.get("attn_scale", _ATTENTION_SCALE)),
            floor_scale=int(raw.get("floor_scale", _FLOOR_SCALE)),
        )
    return {
        "rope": rope,
        "rope_layers": has_rope,
        "interleaved_rope": True,
        "norms_rotated_heads": norms_heads,
        "query_temperature": temperature,
        "layer_windows": (0,) * num_layers,
        "layer_chunks": _chunks(raw, has_rope),
        # For layers without experts; the file's intermediate_size is that of experts.
        "intermediate_size": int(raw["intermediate_size_mlp"]),
        "experts": _experts(raw, num_layers),
        "left_out": _VISION,
    }


def _experts(raw: Mapping[str, Any], num_layers: int) -> ExpertsConfig:
    layers, step = raw.get("moe_layers"), int(raw.get("interleave_moe_layer_step", 1))
    if layers is None:
        layers = range(step - 1, num_layers, step) if step > 0 else ()
    return ExpertsConfig(
        num_experts=int(raw["num_local_experts"]),
        num_experts_per_token=int(raw["num_experts_per_tok"]),
        intermediate_size=int(raw["intermediate_size"]),
        renormalize=False,
        layers=tuple(layer in layers for layer in range(num_layers)),
        scoring="sigmoid",
        scales_inputs=True,
        shared_intermediate_size=int(raw["intermediate_size"]),
    )


def _chunks(raw: Mapping[str, Any], rope_layers: tuple[bool, ...]) -> tuple[int, ...]:
    types, num_layers = raw.get("layer_types"), len(rope_layers)
    if types is None:
        types = ["chunked_attention" if has_rope else "full_attention" for has_rope in rope_layers]
    chunk = int(raw.get("attention_chunk_size", _CHUNK) or 0)
    chunks = sizes_by_type(chunk, types, num_layers, kind="chunked_attention")
    if chunk < 1 and "chunked_attention" in types:
        raise ValueError(f"attention_chunk_size={raw['attention_chunk_size']!r} must be at least 1")
    return chunks


# The prefix of the text model's tensors in files that also hold a vision model.
_TEXT = "language_model."
# [N, H, 2I], the gate's columns first, and [N, I, H].
_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"


class _Expert(NamedTuple):
    """The place of an expert's weight: columns of its matrix in a stored tensor, whose rows are inputs."""

    stored: str
    number: int
    columns: slice


class Llama4Files(SafetensorsFiles):
    """Presents the text model's names without a prefix, and each expert's weights separately, as linear layers read
    them. Only the parts of a tensor that are read are ever in memory."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._stored: dict[str, str] = {}
        self._experts: dict[str, _Expert] = {}
        shapes, dtypes = self.shapes, self.dtypes
        self.shapes, self.dtypes = {}, {}
        self._prefix = _TEXT if any(name.startswith(_TEXT) for name in shapes) else ""
        for stored, shape in shapes.items():
            name = stored.removeprefix(_TEXT)
            if len(shape) == 3 and name.endswith((_GATE_UP, _DOWN)):
                self._add_experts(name, stored, shape, dtypes[stored])
            else:
                self._stored[name] = stored
                self.shapes[name], self.dtypes[name] = shape, dtypes[stored]

    def stored_name(self, name: str) -> str:
        if name in self._experts:
            prefix, _, _ = self._experts[name].stored.partition(".experts.")
            _, _, suffix = name.partition(".experts.")
            return f"{prefix}.experts.{suffix}"
        # Packed weights have other tensors in their place.
        return self._stored.get(name, f"{self._prefix}{name}")

    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        expert = self._experts.get(name)
        if expert is None:
            return self._read_rows(self._stored[name], rows)
        columns = expert.columns
        if rows is not None:
            columns = slice(columns.start + rows.start, columns.start + rows.stop)
        columns_first = self._read(
            expert.stored, lambda file, stored: file.get_slice(stored)[expert.number, :, columns]
        )
        return columns_first.t().contiguous()

    def _add_experts(self, name: str, stored: str, shape: tuple[int, ...], dtype: str) -> None:
        prefix, _, kind = name.rpartition(".")
        num_experts, num_inputs, num_columns = shape
        parts = {"down_proj": slice(0, num_columns)}
        if kind == "gate_up_proj":
            half = num_columns // 2
            parts = {"gate_proj": slice(0, half), "up_proj": slice(half, num_columns)}
        for number in range(num_experts):
            for part, columns in parts.items():
                weight = f"{prefix}.{number}.{part}.weight"
                self._experts[weight] = _Expert(stored, number, columns)
                self.shapes[weight] = (columns.stop - columns.start, num_inputs)
                self.dtypes[weight] = dtype


LLAMA4 = Family(
    # The second has its text model under text_config, next to a vision model.
    architectures=("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    model=Llama4Model,
    fields=llama4_fields,
    text_config=llama4_text_config,
    open_files=Llama4Files,
)
