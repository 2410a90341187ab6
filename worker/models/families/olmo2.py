"""OLMo 2 (arXiv 2501.00656) and 3, which adds layers with a window: attention and MLP norm what they add to the
residual stream, not what they read from it; all heads of q share one norm, and so do all heads of k."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kernels.backend import Backend
from worker.layers.attention import Attention
from worker.layers.mlp import GatedMLP
from worker.layers.residual import OutputNorm, ResidualStream, norm_shapes
from worker.model_config import ModelConfig, RopeConfig
from worker.models.decoder import Block, Decoder
from worker.models.family import Family, GgufFamily
from worker.models.rope import rope_from_config_json, ropes_by_type
from worker.models.windows import alternating_windows, windows_by_type
from worker.weights.reader import Shape, WeightReader

_ATTENTION_NORM, _MLP_NORM = "post_attention_layernorm", "post_feedforward_layernorm"


class Olmo2Block(Block):
    def __init__(self, config: ModelConfig, layer: int, prefix: str, reader: WeightReader, backend: Backend) -> None:
        self.attention = Attention(config, layer, f"{prefix}.self_attn", None, reader, backend)
        self.attention_norm = OutputNorm(f"{prefix}.{_ATTENTION_NORM}", config.rms_norm_eps, reader, backend)
        self.mlp = GatedMLP(config, f"{prefix}.mlp", None, reader, backend)
        self.mlp_norm = OutputNorm(f"{prefix}.{_MLP_NORM}", config.rms_norm_eps, reader, backend)

    def forward(self, x: ResidualStream) -> ResidualStream:
        x = x + self.attention_norm(self.attention(x))
        return x + self.mlp_norm(self.mlp(x))

    @classmethod
    def shapes(cls, config: ModelConfig, layer: int, prefix: str) -> dict[str, Shape]:
        return {
            **Attention.shapes(config, f"{prefix}.self_attn"),
            **GatedMLP.shapes(config, f"{prefix}.mlp"),
            **norm_shapes(prefix, config.hidden_size, _ATTENTION_NORM, _MLP_NORM),
        }


class Olmo2Model(Decoder):
    block = Olmo2Block


# Three of four layers have a window, and a rope of their own without scaling.
_PERIOD, _THETA = 4, 500000.0


def olmo2_fields(raw: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    return {"rope": rope_from_config_json(raw), "layer_windows": (0,) * num_layers, "projection_norm": True}


def olmo3_fields(raw: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    rope, local_rope = ropes_by_type(raw, _THETA, raw.get("rope_theta", _THETA))
    return {
        "rope": rope,
        "local_rope": local_rope,
        "layer_windows": alternating_windows(raw, num_layers, period=_PERIOD),
        "projection_norm": True,
    }


def olmo2_from_gguf(config: ModelConfig, get: Any) -> ModelConfig:
    """Files of OLMo 3 have the same architecture, with a window and a list that is true for layers with it."""
    config = replace(config, qk_norm=False, projection_norm=True)
    window, pattern = get("attention.sliding_window", 0), get("attention.sliding_window_pattern", None)
    if not window:
        return config
    if pattern is None:
        windows = alternating_windows({"sliding_window": window}, config.num_layers, period=_PERIOD)
    else:
        types = ["sliding_attention" if has_window else "full_attention" for has_window in pattern]
        windows = windows_by_type(int(window), types, config.num_layers)
    return replace(config, layer_windows=windows, local_rope=RopeConfig(theta=config.rope.theta))


OLMO2 = Family(
    architectures=("Olmo2ForCausalLM",),
    model=Olmo2Model,
    fields=olmo2_fields,
    gguf=GgufFamily(
        name="olmo2",
        architecture="Olmo2ForCausalLM",
        layer_names={
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        complete=olmo2_from_gguf,
    ),
)
OLMO3 = Family(architectures=("Olmo3ForCausalLM",), model=Olmo2Model, fields=olmo3_fields)
