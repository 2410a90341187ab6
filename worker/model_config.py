"""Describes a decoder as data: sizes, ropes, attention spans, experts. worker.models reads it from a model's files."""

import json
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from kernels.attention.recurrent.shape import RecurrentShape
from kernels.elementwise.silu_mul import Activation
from kernels.kv_cache.layout import LatentShape
from kernels.moe.routing import Scoring
from kernels.shard import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class TemperatureConfig:
    """Scales queries so that attention stays sharp over long contexts (Scalable-Softmax, arXiv 2501.19399): a query at
    position p is multiplied by 1 + scale * log(1 + floor((p + 1) / floor_scale))."""

    scale: float
    floor_scale: int

    def __post_init__(self) -> None:
        if self.floor_scale < 1:
            raise ValueError(f"floor_scale is {self.floor_scale}: it must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1). Each head of a query or a key has
    nope_size numbers that rope leaves alone and rope_size numbers that it rotates."""

    # Size of the latent that queries are projected from; None: they are projected from the hidden state.
    query_rank: int | None
    # Size of the latent that keys and values are projected from; the latent is what is cached.
    latent_size: int
    nope_size: int
    rope_size: int
    value_size: int
    # Attention scores are multiplied by it.
    scale: float
    # Rope rotates the pairs (2i, 2i + 1) of the checkpoint, not (i, i + rope_size / 2).
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
                raise ValueError(f"{name}={size} is not supported: it must be a multiple of 8")

    @property
    def head_size(self) -> int:
        """Size of one head of the queries and keys."""
        return self.nope_size + self.rope_size

    @property
    def entry_size(self) -> int:
        """Numbers cached per token, shared by all heads."""
        return self.latent_size + self.rope_size

    def shape(self, num_heads: int) -> LatentShape:
        """The shape of attention with this many heads (e.g. those of one rank)."""
        return LatentShape(num_heads=num_heads, latent_size=self.latent_size, rope_size=self.rope_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Parameters of the inverse frequencies. Fields that a scaling does not use keep their defaults.

    scaling is one of SCALINGS, or "none": no rotation. freq_factors, if given, divide the inverse frequencies
    elementwise (GGUF files store Llama 3's scaling that way).
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
    # Cosines and sines are multiplied by it.
    attention_factor: float = 1.0
    freq_factors: tuple[float, ...] | None = None
    # longrope: freq_factors for sequences of up to original_max_position_embeddings tokens, and for longer ones.
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    # dynamic, longrope: the longest sequence that the model will compute. Frequencies depend on it, not on a sequence's
    # own length: cached keys stay valid as a sequence grows.
    length: int = 0

    @property
    def variant(self) -> str:
        """Tells ropes apart that differ by `length`; empty: they never do."""
        if self.scaling == "longrope":
            return "long" if self.is_long else "short"
        return f"dynamic {max(self.length, self.original_max_position_embeddings)}" if self.scaling == "dynamic" else ""

    @property
    def is_long(self) -> bool:
        return self.length > self.original_max_position_embeddings

    def for_length(self, length: int) -> "RopeConfig":
        """Returns the rope for sequences of up to `length` tokens."""
        return replace(self, length=length) if self.scaling in ("dynamic", "longrope") else self


NO_ROPE = RopeConfig(theta=1.0, scaling="none")


class AttentionSpan(NamedTuple):
    """Limits which earlier tokens a query sees; see kernels.attention.paged.AttentionPlanner."""

    window: int = 0
    attention_chunk: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """Mixture-of-experts settings, the same for all such layers of a model. A token's experts are the
    num_experts_per_token with the largest scores; see kernels.moe.routing."""

    num_experts: int
    num_experts_per_token: int
    # Size of one expert's MLP.
    intermediate_size: int
    # The weights of a token's experts are scaled to add up to 1.
    renormalize: bool
    # Per layer: True if it has experts in place of an MLP.
    layers: tuple[bool, ...]
    # The function that turns router logits into scores.
    scoring: Scoring = "softmax"
    # Each expert has a bias, added to its score only to choose experts, not to weight them.
    has_bias: bool = False
    # Experts form num_groups groups of successive experts; a token's experts come from top_k_groups of them.
    num_groups: int = 1
    top_k_groups: int = 1
    # The final expert weights are multiplied by it.
    scaling_factor: float = 1.0
    # The weights multiply an expert's input, not its output.
    scales_inputs: bool = False
    # Size of a shared MLP beside the experts, which computes every token; 0: there is none.
    shared_intermediate_size: int = 0
    # The shared MLP's result is multiplied by the sigmoid of a linear layer with one output.
    has_shared_gate: bool = False
    # The router's logits, and each expert's projections, have biases.
    has_linear_biases: bool = False
    # Activation of the experts' gates; a shared MLP has silu.
    activation: Activation = "silu"

    def __post_init__(self) -> None:
        if not 1 <= self.num_experts_per_token <= self.num_experts:
            raise ValueError(
                f"num_experts_per_tok is {self.num_experts_per_token}: it must be 1 to {self.num_experts} (all experts)"
            )
        if self.intermediate_size < 1:
            raise ValueError(f"experts have intermediate size {self.intermediate_size}: it must be at least 1")
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise ValueError(f"n_group={self.num_groups} does not divide {self.num_experts} experts")
        eligible = self.top_k_groups * (self.num_experts // self.num_groups)
        if not 1 <= self.top_k_groups <= self.num_groups or eligible < self.num_experts_per_token:
            raise ValueError(
                f"topk_group={self.top_k_groups} of n_group={self.num_groups} groups leaves {eligible} experts to "
                f"choose num_experts_per_tok={self.num_experts_per_token} from"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryConfig:
    """A model that the modules of transformers compute; see worker.models.library."""

    # config.json.
    text: str
    # The version of transformers.
    version: str
    # A step's tokens are padded to a multiple of it, so that elementwise functions give each row the same bits wherever
    # it is; see worker.models.library.probe.
    row_multiple: int = 1
    # Names of weights that modules give to the linear function themselves, as many routers do.
    weights: tuple[str, ...] = ()
    # Names of linear layers that are called with the same input, one after the other: each group is computed as one.
    fused: tuple[tuple[str, ...], ...] = ()

    @property
    def raw(self) -> dict[str, Any]:
        return json.loads(self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrenceConfig:
    """Layers that carry a state from token to token in place of attention, the same for all such layers of a model. The
    state is kept in the KV blocks: see worker.layers.kv_cache."""

    # The sizes of all ranks together.
    shape: RecurrentShape
    # Per layer: True if it has a state in place of attention.
    layers: tuple[bool, ...]
    # The least and the most that a token's step may be.
    steps: tuple[float, float] = (0.0, float("inf"))
    # Biases on: the input and output projections; the convolution.
    bias: bool = False
    conv_bias: bool = False

    def shape_of(self, shard: Shard) -> RecurrentShape:
        """Returns the sizes of one rank's part: whole groups of heads. Raises ValueError if there are too few."""
        groups = shard.of(self.shape.num_groups, "groups of heads that share keys (n_groups, linear_num_key_heads)")
        num_groups = groups.stop - groups.start
        num_heads = self.shape.num_heads // self.shape.num_groups * num_groups
        return replace(self.shape, num_heads=num_heads, num_groups=num_groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Sampling defaults from generation_config.json; None where it has none."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shapes and computation rules of a decoder."""

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
    # Rope of layers with a sliding window, if it differs.
    local_rope: RopeConfig | None = None
    # Per layer: True if it has rope; the others tell positions apart by the causal mask alone. Empty: all have it.
    rope_layers: tuple[bool, ...] = ()
    # Rope rotates the first rope_dims numbers of a head; None: all.
    rope_dims: int | None = None
    # Rope rotates the pairs (2i, 2i + 1) of the checkpoint, not (i, i + rope_dims / 2).
    interleaved_rope: bool = False
    # Pairs of numbers of a head that rope rotates by the position in time, height and width (M-RoPE); None: positions
    # have one axis.
    mrope_section: tuple[int, int, int] | None = None
    # Tokens within an item that an encoder's embeddings replace; see runtime.media.recipes.
    embedded_token_ids: frozenset[int] = frozenset()
    rms_norm_eps: float
    max_position_embeddings: int
    # Biases on: q, k and v; the attention's output; the MLP's three projections.
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    # RMS norm of each head of q and k, before rope.
    qk_norm: bool = False
    # RMS norm without weights of each head of q and k, in layers with rope.
    norms_rotated_heads: bool = False
    # Scales the queries of layers without rope; None: no scaling.
    query_temperature: TemperatureConfig | None = None
    # RMS norm over all heads of q together, and over all heads of k together, before rope.
    projection_norm: bool = False
    # The checkpoint stores the weights of norms minus 1.
    norms_lack_one: bool = False
    # Activation of the MLP's gate.
    activation: Activation = "silu"
    # Embeddings are multiplied by it.
    embedding_scale: float = 1.0
    # Attention scores are divided by its square root; None: by that of the head size.
    query_pre_attn_scalar: float | None = None
    # Attention scores s become cap * tanh(s / cap); 0: no cap.
    attention_soft_cap: float = 0.0
    # Each head has a score that joins every softmax without a value (a sink).
    has_sinks: bool = False
    # The factor of all results of attention and MLP that are added to the residual stream. Here the stream is held
    # divided by it instead, so that only embeddings and the epsilon of norms change; rms_norm_eps is that epsilon.
    residual_multiplier: float = 1.0
    # Logits are divided by it.
    logits_scaling: float = 1.0
    # Logits l become cap * tanh(l / cap); 0: no cap.
    logits_soft_cap: float = 0.0
    tie_word_embeddings: bool = False
    # Per layer: the sliding window in tokens, including the token itself; 0: the layer sees everything.
    layer_windows: tuple[int, ...]
    # Per layer: the chunk size in tokens; a token attends only within its own chunk; 0: no chunks. Empty: no chunks in
    # any layer.
    layer_chunks: tuple[int, ...] = ()
    # None: every layer has an MLP.
    experts: ExpertsConfig | None = None
    # None: the keys and values of each KV head are cached as they are.
    latent: LatentConfig | None = None
    # None: the layers of an own family compute the model.
    library: LibraryConfig | None = None
    # None: every layer has attention.
    recurrence: RecurrenceConfig | None = None
    # Results of attention are multiplied by the sigmoid of gates, which the query projection has beside each head.
    attention_gate: bool = False
    # Layers for multi-token prediction that the checkpoint holds after the model's own.
    num_mtp_layers: int = 0
    # Name prefixes of tensors that a checkpoint may hold and the model does not use.
    left_out: tuple[str, ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    default_sampling: SamplingDefaults = SamplingDefaults()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_size < 2 or self.head_size % 2:
            raise ValueError(f"head_size is {self.head_size}: it must be even, since rope rotates pairs of numbers")
        if self.rope_dims is not None and (not 2 <= self.rope_dims <= self.head_size or self.rope_dims % 2):
            raise ValueError(
                f"rope rotates {self.rope_dims} of {self.head_size} numbers of a head (partial_rotary_factor): it must "
                "be an even number of them"
            )
        assert len(self.layer_windows) == self.num_layers
        assert len(self.layer_chunks) in (0, self.num_layers)
        assert len(self.rope_layers) in (0, self.num_layers)
        assert self.recurrence is None or len(self.recurrence.layers) == self.num_layers

    @property
    def longest_context(self) -> int:
        """The most tokens of a sequence: a dynamic rope stretches max_position_embeddings, if a user asks for more."""
        is_dynamic = self.rope.scaling == "dynamic"
        return int(self.max_position_embeddings * self.rope.factor) if is_dynamic else self.max_position_embeddings

    def for_length(self, length: int) -> "ModelConfig":
        """Returns the config for sequences of up to `length` tokens; 0: max_position_embeddings."""
        length = length or self.max_position_embeddings
        local = None if self.local_rope is None else self.local_rope.for_length(length)
        return replace(self, rope=self.rope.for_length(length), local_rope=local)

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def attention_scale(self) -> float:
        """The factor of attention scores."""
        return (self.query_pre_attn_scalar or self.head_size) ** -0.5

    @property
    def rope_size(self) -> int:
        """Numbers of a head that rope rotates."""
        return (self.rope_dims or self.head_size) if self.latent is None else self.latent.rope_size

    @property
    def rotary_width(self) -> int:
        """Numbers of a head, or of its part for rope, that a table of cosines and sines covers."""
        return self.head_size if self.latent is None else self.latent.rope_size

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        ropes = (self.rope,) if self.local_rope is None else (self.rope, self.local_rope)
        return ropes if all(self.rope_layers) else (*ropes, NO_ROPE)

    def has_rope(self, layer: int) -> bool:
        return not self.rope_layers or self.rope_layers[layer]

    def has_temperature(self, layer: int) -> bool:
        return self.query_temperature is not None and not self.has_rope(layer)

    def rope_of(self, layer: int) -> int:
        """The index into `ropes` of the layer's rope."""
        if not self.has_rope(layer):
            return len(self.ropes) - 1
        return 1 if self.local_rope is not None and self.layer_windows[layer] else 0

    def attention_span_of(self, layer: int) -> AttentionSpan:
        return AttentionSpan(self.layer_windows[layer], self.layer_chunks[layer] if self.layer_chunks else 0)

    def has_state(self, layer: int) -> bool:
        """True if the layer carries a state from token to token, in place of attention."""
        return self.recurrence is not None and self.recurrence.layers[layer]

    @property
    def attention_spans(self) -> frozenset[AttentionSpan]:
        """The distinct spans of all layers with attention."""
        return frozenset(self.attention_span_of(layer) for layer in range(self.num_layers) if not self.has_state(layer))
