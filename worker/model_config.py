"""Describes a decoder as data: sizes, ropes, attention spans, experts. Nothing here reads a file; worker.models
does.
"""

from dataclasses import dataclass
from typing import NamedTuple

from kernels.elementwise.silu_mul import Activation
from kernels.kv_cache.layout import LatentShape
from kernels.moe.routing import Scoring


@dataclass(frozen=True, slots=True, kw_only=True)
class TemperatureConfig:
    """A query at position p is multiplied by 1 + scale * log(1 + floor((p + 1) / floor_scale)), so that attention stays
    as sharp over long contexts (Scalable-Softmax, arXiv 2501.19399)."""

    scale: float
    floor_scale: int

    def __post_init__(self) -> None:
        if self.floor_scale < 1:
            raise ValueError(f"floor_scale={self.floor_scale} must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class IropeConfig:
    """Layers with rope, and layers without, which tell positions apart by the causal mask alone. Pairs that rope turns
    are (2i, 2i + 1) in the checkpoint, not (i, i + head size / 2)."""

    # Of each layer, whether it has rope.
    rope_layers: tuple[bool, ...]
    # RMS norm, without weights, of each head of q and k, in layers with rope.
    norms_heads: bool
    # Of queries in layers without rope; None: they stay as they are.
    temperature: TemperatureConfig | None

    def has_head_norm(self, layer: int) -> bool:
        return self.norms_heads and self.rope_layers[layer]

    def has_temperature(self, layer: int) -> bool:
        return self.temperature is not None and not self.rope_layers[layer]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1). A query, and a key, consists of
    nope_size numbers that rope leaves alone and rope_size that it turns."""

    # Of what queries are made from; None: they are made from the hidden state.
    query_rank: int | None
    # Of what keys and values are made from, and what is cached.
    latent_size: int
    nope_size: int
    rope_size: int
    value_size: int
    # That scores are multiplied by.
    scale: float
    # Pairs that rope turns are (2i, 2i + 1) in the checkpoint, not (i, i + rope_size / 2).
    interleaved: bool = True

    def __post_init__(self) -> None:
        sizes = {
            "q_lora_rank": self.query_rank or 8,
            "kv_lora_rank": self.latent_size,
            "qk_nope_head_dim": self.nope_size,
            "qk_rope_head_dim": self.rope_size,
            "v_head_dim": self.value_size,
        }
        for name, size in sizes.items():
            if size < 8 or size % 8:
                raise ValueError(f"{name}={size} is not supported; multiples of 8 are")

    @property
    def head_size(self) -> int:
        """Of queries and keys."""
        return self.nope_size + self.rope_size

    @property
    def entry_size(self) -> int:
        """Numbers that are cached of a token, for all heads."""
        return self.latent_size + self.rope_size

    def shape(self, num_heads: int) -> LatentShape:
        """Of attention with so many heads, of a rank's, say."""
        return LatentShape(num_heads=num_heads, latent_size=self.latent_size, rope_size=self.rope_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """What inverse frequencies follow from; fields a scaling does not use keep their defaults.

    scaling is one of SCALINGS, or none: nothing turns. freq_factors, if given, divide the inverse frequencies one by
    one (GGUF files store Llama 3's scaling that way).
    """

    theta: float
    scaling: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    # llama3
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    # yarn
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    # Multiplies cosines and sines.
    attention_factor: float = 1.0
    freq_factors: tuple[float, ...] | None = None


NO_ROPE = RopeConfig(theta=1.0, scaling="none")


class AttentionSpan(NamedTuple):
    """Of the tokens before it, which ones a query sees; see kernels.attention.paged.AttentionPlanner."""

    window: int = 0
    attention_chunk: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """Of all mixtures of a model. A token's experts are the num_experts_per_token with the largest scores, as
    kernels.moe.routing says."""

    num_experts: int
    num_experts_per_token: int
    # Of one expert's MLP.
    intermediate_size: int
    # Weights of a token's experts add up to 1.
    renormalize: bool
    # Of each layer, whether it has a mixture in place of an MLP.
    layers: tuple[bool, ...]
    # What a router's logits become.
    scoring: Scoring = "softmax"
    # Each expert has a bias that is added to its score for the choice alone.
    has_bias: bool = False
    # Of successive experts, and of how many of them a token's experts may be.
    num_groups: int = 1
    top_k_groups: int = 1
    # That weights are multiplied by in the end.
    scaling_factor: float = 1.0
    # Weights multiply what an expert gets, not what it gives.
    scales_inputs: bool = False
    # Of an MLP beside the experts, which computes every token; 0: there is none.
    shared_intermediate_size: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.num_experts_per_token <= self.num_experts:
            raise ValueError(f"num_experts_per_tok={self.num_experts_per_token} of {self.num_experts} experts")
        if self.intermediate_size < 1:
            raise ValueError(f"experts of intermediate size {self.intermediate_size}; at least 1 is needed")
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise ValueError(f"n_group={self.num_groups} does not divide {self.num_experts} experts")
        eligible = self.top_k_groups * (self.num_experts // self.num_groups)
        if not 1 <= self.top_k_groups <= self.num_groups or eligible < self.num_experts_per_token:
            raise ValueError(
                f"topk_group={self.top_k_groups} of n_group={self.num_groups} groups, with {eligible} experts for the "
                f"num_experts_per_tok={self.num_experts_per_token} of a token"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What generation_config.json says about sampling; None where it says nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shapes and rules of a decoder. Immutable."""

    # One of ARCHITECTURES.
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rope: RopeConfig
    # Of layers with a sliding window, if it is another one.
    local_rope: RopeConfig | None = None
    rms_norm_eps: float
    max_position_embeddings: int
    # Biases on q, k and v; on the attention's output; on the MLP's three projections.
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    # RMS norm of each head of q and k, before rope.
    qk_norm: bool = False
    # RMS norm of all heads of q together, and of all of k, before rope.
    projection_norm: bool = False
    # Whether norms are stored as what their weights differ from 1 by.
    norms_lack_one: bool = False
    # Of the MLP's gate.
    activation: Activation = "silu"
    # That embeddings are multiplied by.
    embedding_scale: float = 1.0
    # Scores of attention are divided by its root; None: the head size.
    query_pre_attn_scalar: float | None = None
    tie_word_embeddings: bool = False
    # A layer's sliding window in tokens, the token itself included; 0: the layer sees everything.
    layer_windows: tuple[int, ...]
    # A layer's chunks of positions, in tokens, of which a token sees none but its own; 0: there are none. Empty: none
    # in any layer.
    layer_chunks: tuple[int, ...] = ()
    # None: all layers have rope.
    irope: IropeConfig | None = None
    # None: every layer has an MLP.
    experts: ExpertsConfig | None = None
    # None: keys and values are cached as they are, of each KV head.
    latent: LatentConfig | None = None
    # With which names of tensors begin that a checkpoint may hold and that nothing computes.
    left_out: tuple[str, ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    default_sampling: SamplingDefaults = SamplingDefaults()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is no multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_size < 2 or self.head_size % 2:
            raise ValueError(f"head_size={self.head_size} must be even: rope turns pairs of numbers")
        assert len(self.layer_windows) == self.num_layers
        assert len(self.layer_chunks) in (0, self.num_layers)

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def attention_scale(self) -> float:
        """That scores of attention are multiplied by."""
        return (self.query_pre_attn_scalar or self.head_size) ** -0.5

    @property
    def rope_size(self) -> int:
        """Numbers of a head that rope turns."""
        return self.head_size if self.latent is None else self.latent.rope_size

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        if self.irope is not None:
            return self.rope, NO_ROPE
        return (self.rope,) if self.local_rope is None else (self.rope, self.local_rope)

    def rope_of(self, layer: int) -> int:
        """Which of `ropes` the layer has."""
        if self.irope is not None:
            return 0 if self.irope.rope_layers[layer] else 1
        return 1 if self.local_rope is not None and self.layer_windows[layer] else 0

    def attention_span_of(self, layer: int) -> AttentionSpan:
        return AttentionSpan(self.layer_windows[layer], self.layer_chunks[layer] if self.layer_chunks else 0)

    @property
    def attention_spans(self) -> frozenset[AttentionSpan]:
        """Of all layers."""
        return frozenset(self.attention_span_of(layer) for layer in range(self.num_layers))
