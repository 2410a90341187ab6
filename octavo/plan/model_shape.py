"""A decoder in the numbers that decide what a step costs: sizes of weights and of KV, and multiplications a token."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Counts are of parameters (numbers, not bytes) in one layer unless said otherwise."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    # Heads whose KV is kept; 0 for MLA, whose latent every rank keeps whole.
    num_kv_heads: int
    vocab_size: int
    max_model_len: int
    # The head is a matrix of its own.
    has_own_head: bool = True
    attention_params: int
    # Of a layer without experts, or of the experts that every token passes.
    mlp_params: int
    # Of one expert; layers that have experts, and how many of these there are and each token passes.
    expert_params: int = 0
    num_expert_layers: int = 0
    num_experts: int = 0
    num_active_experts: int = 0
    # MLP parameters of the layers that have no experts, if others have.
    dense_mlp_params: int = 0
    # Numbers of KV that a token leaves in a layer.
    kv_size: int
    # Multiplications of one (query, key) pair: scores and values, over all heads.
    pair_macs: int
    # Layers that see at most `window` tokens.
    num_window_layers: int = 0
    window: int = 0
    # Bytes that a parameter of the layers takes (quantized models: less than the dtype), and one of embedding and head.
    layer_param_bytes: float = 2.0
    embedding_param_bytes: float = 2.0

    @property
    def num_dense_layers(self) -> int:
        return self.num_layers - self.num_expert_layers

    @property
    def embedding_params(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def stored_layer_params(self) -> int:
        """Of all layers together, every expert counted."""
        return self._layer_params(self.num_experts)

    @property
    def active_layer_params(self) -> int:
        """That one token is multiplied with, in all layers together."""
        return self._layer_params(self.num_active_experts)

    @property
    def num_params(self) -> int:
        return self.stored_layer_params + self.embedding_params * (2 if self.has_own_head else 1)

    @property
    def weight_bytes(self) -> float:
        embeddings = self.num_params - self.stored_layer_params
        return self.stored_layer_params * self.layer_param_bytes + embeddings * self.embedding_param_bytes

    def divides_among(self, num_ranks: int) -> bool:
        """Every rank gets as many heads, and KV heads are divided or repeated evenly."""
        kv_heads = self.num_kv_heads or 1
        return not self.num_heads % num_ranks and (not kv_heads % num_ranks or not num_ranks % kv_heads)

    def touched_layer_params(self, num_tokens: int) -> float:
        """Parameters that so many tokens read, in all layers together: few tokens miss most experts.

        Experts are taken to be chosen evenly and independently.
        """
        if not self.num_experts or not num_tokens:
            return self._layer_params(self.num_experts)
        missed = (1 - self.num_active_experts / self.num_experts) ** num_tokens
        return self._layer_params(self.num_experts * (1 - missed))

    def _layer_params(self, num_experts: float) -> int:
        dense_mlp = self.dense_mlp_params or self.mlp_params
        return int(
            self.num_layers * self.attention_params
            + self.num_dense_layers * dense_mlp
            + self.num_expert_layers * (self.mlp_params + num_experts * self.expert_params)
        )
