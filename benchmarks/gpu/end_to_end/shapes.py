"""The shapes of the models that are measured with random weights."""

from dataclasses import dataclass, replace

import torch

from worker.model_config import ModelConfig, RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A model as it is served."""

    name: str
    config: ModelConfig
    # Weights of linear layers in e4m3, quantized from floats; otherwise bf16.
    fp8: bool = False
    kv_cache_dtype: torch.dtype = torch.bfloat16

    def with_layers(self, num_layers: int) -> "Variant":
        config = replace(self.config, num_layers=num_layers, layer_windows=(0,) * num_layers)
        return replace(self, name=f"{self.name}, {num_layers} layers", config=config)


_LLAMA_8B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_size=128,
    rope=RopeConfig(
        theta=500000.0,
        scaling="llama3",
        factor=8.0,
        original_max_position_embeddings=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    ),
    rms_norm_eps=1e-5,
    max_position_embeddings=131072,
    layer_windows=(0,) * 32,
)
_QWEN_06B = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_size=128,
    rope=RopeConfig(theta=1e6),
    rms_norm_eps=1e-6,
    max_position_embeddings=40960,
    qk_norm=True,
    tie_word_embeddings=True,
    layer_windows=(0,) * 28,
)
_TOY = replace(
    _QWEN_06B,
    vocab_size=131,
    hidden_size=64,
    intermediate_size=128,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_size=64,
    layer_windows=(0,),
)
# Most needed first.
VARIANTS = (
    Variant(name="Qwen3-0.6B", config=_QWEN_06B),
    Variant(name="Llama-3.1-8B", config=_LLAMA_8B),
    Variant(name="Llama-3.1-8B fp8", config=_LLAMA_8B, fp8=True),
    Variant(name="Llama-3.1-8B fp8 kv8", config=_LLAMA_8B, fp8=True, kv_cache_dtype=torch.float8_e4m3fn),
)
TOY_VARIANTS = (
    Variant(name="toy", config=_TOY),
    Variant(name="toy fp8 kv8", config=_TOY, fp8=True, kv_cache_dtype=torch.float8_e4m3fn),
)
