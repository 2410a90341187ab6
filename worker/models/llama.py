"""The llama family (arXiv 2302.13971): Llama 2 and 3, SmolLM2, Mistral, Qwen2, Qwen3 dense.

They differ in what the config says: attention biases, head norms, sliding windows, rope, tied embeddings.
Legend: T tokens of the step, S tokens whose logits are wanted, E hidden size, V vocabulary.
"""

from collections.abc import Callable

import torch

from kernels.compute_path import ComputePath, compute_path
from kernels.paged_attention import AttentionPlanner, HeadShape
from worker.forward_context import ForwardContext, forward_context
from worker.input_batch import InputBatch
from worker.kv_cache import KVCache
from worker.layers.attention import Attention
from worker.layers.embedding import Embedding
from worker.layers.linear import load_head
from worker.layers.mlp import GatedMLP
from worker.layers.rotary import Rotary
from worker.model_config import ModelConfig
from worker.replay import Replay
from worker.take_tensor import Shape, TakeTensor
from worker.workspace import Workspace


class LlamaLayer:
    def __init__(self, config: ModelConfig, layer: int, take: TakeTensor, path: ComputePath) -> None:
        prefix = f"model.layers.{layer}"
        self._attention = Attention(
            config, layer, f"{prefix}.self_attn", norm=f"{prefix}.input_layernorm", take=take, path=path
        )
        self._mlp = GatedMLP(config, f"{prefix}.mlp", norm=f"{prefix}.post_attention_layernorm", take=take, path=path)

    @property
    def weight_bytes(self) -> int:
        return self._attention.weight_bytes + self._mlp.weight_bytes

    def add_to_(self, x_TE: torch.Tensor) -> None:
        """Adds attention, then MLP, each of its own norm, to the residual stream, in place."""
        self._attention.add_to_(x_TE)
        self._mlp.add_to_(x_TE)


class LlamaModel:
    """The residual stream is float32 whatever the weights are: adding to it in place costs no more, and rounds less."""

    def __init__(self, config: ModelConfig, take: TakeTensor, dtype: torch.dtype) -> None:
        path = compute_path(dtype, config.head_size)
        self.config = config
        self.path = path
        self._embed = Embedding(take("model.embed_tokens.weight"), path)
        self._rotary = Rotary(config.rope, config.head_size, path)
        self._layers = [LlamaLayer(config, layer, take, path) for layer in range(config.num_layers)]
        head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        self.head = load_head(take, head, path=path, norm="model.norm.weight", eps=config.rms_norm_eps)
        heads = HeadShape(num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_size=config.head_size)
        self._planners = {window: AttentionPlanner(path, heads, window) for window in set(config.layer_windows)}
        self._workspace = Workspace()
        self._forward, self._greedy = Replay(path), Replay(path)

    @property
    def weight_bytes(self) -> int:
        layers = sum(layer.weight_bytes for layer in self._layers)
        return self._embed.num_bytes + layers + self.head.num_bytes

    def forward(self, batch: InputBatch, kv_cache: KVCache) -> torch.Tensor:
        """Computes the batch's tokens, writes their KV, gives the residual stream after the last layer, float32 [T,
        E], in memory that the next call uses again."""
        self._run(self._forward, self._compute, batch, kv_cache)
        return self._workspace.take("residual", batch.num_tokens, self.config.hidden_size)

    def _run(
        self, replay: Replay, body: Callable[[InputBatch, KVCache], object], batch: InputBatch, kv_cache: KVCache
    ) -> None:
        self._workspace.reserve(batch.num_tokens)
        memory = batch, kv_cache, self._workspace.memory
        replay.run(lambda: body(batch, kv_cache), batch.num_tokens, memory=memory)

    def _compute(self, batch: InputBatch, kv_cache: KVCache) -> torch.Tensor:
        x_TE = self._embed(batch.token_ids_T, self._workspace)
        with forward_context(self._context(batch, kv_cache)):
            for layer in self._layers:
                layer.add_to_(x_TE)
        return x_TE

    def _compute_greedily(self, batch: InputBatch, kv_cache: KVCache) -> None:
        self.head.argmax(self._compute(batch, kv_cache), out=self._likeliest(batch.num_tokens))

    def _likeliest(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        take = self._workspace.take
        return take("likeliest", num_tokens, dtype=torch.int64), take("largest", num_tokens)

    def logits(self, hidden_SE: torch.Tensor) -> torch.Tensor:
        """float32 [S, V] from rows of `forward`'s result; the final norm is applied here, to these rows alone."""
        if not len(hidden_SE):
            return hidden_SE.new_empty(0, self.config.vocab_size)
        return self.head(hidden_SE).float()

    def greedy(self, batch: InputBatch, kv_cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes the batch as `forward` does. Gives the likeliest token after each of its logit_indices (int64 [S])
        and its logit (float32 [S]), see kernels.sampling.greedy, of logits that are not kept; in memory that the next
        call uses again."""
        if batch.num_logits != batch.num_tokens:
            return self.head.argmax(self.forward(batch, kv_cache)[batch.logit_indices])
        # As in each step that only decodes: then the head goes with the layers.
        self._run(self._greedy, self._compute_greedily, batch, kv_cache)
        return self._likeliest(batch.num_tokens)

    def _context(self, batch: InputBatch, kv_cache: KVCache) -> ForwardContext:
        context = batch.max_blocks * kv_cache.block_size
        for planner in self._planners.values():
            planner.reserve(num_queries=batch.max_tokens, num_rows=batch.max_rows, context=context)
        plans = {
            window: planner.plan(
                query_starts=batch.query_starts,
                context_lens=batch.context_lens_S,
                block_tables=batch.block_tables_SB,
                block_size=kv_cache.block_size,
                cache_dtype=kv_cache.layers[0].dtype,
            )
            for window, planner in self._planners.items()
        }
        return ForwardContext(
            kv_cache=kv_cache,
            slots_T=batch.slots_T,
            rope_turns=self._rotary(batch.positions_T, self._workspace),
            attention_plans=plans,
            workspace=self._workspace,
        )

    @staticmethod
    def tensor_shapes(config: ModelConfig) -> dict[str, Shape]:
        """The tensors of a checkpoint, by their Hugging Face names."""
        hidden, ffn = config.hidden_size, config.intermediate_size
        q, kv = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
        linears = {  # name: inputs, outputs, bias
            "self_attn.q_proj": (hidden, q, config.qkv_bias),
            "self_attn.k_proj": (hidden, kv, config.qkv_bias),
            "self_attn.v_proj": (hidden, kv, config.qkv_bias),
            "self_attn.o_proj": (q, hidden, config.attention_output_bias),
            "mlp.gate_proj": (hidden, ffn, config.mlp_bias),
            "mlp.up_proj": (hidden, ffn, config.mlp_bias),
            "mlp.down_proj": (ffn, hidden, config.mlp_bias),
        }
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
        if config.qk_norm:
            norms |= {"self_attn.q_norm": config.head_size, "self_attn.k_norm": config.head_size}

        shapes: dict[str, Shape] = {
            "model.embed_tokens.weight": (config.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        if not config.tie_word_embeddings:
            shapes["lm_head.weight"] = (config.vocab_size, hidden)
        for prefix in (f"model.layers.{layer}" for layer in range(config.num_layers)):
            for name, (inputs, outputs, bias) in linears.items():
                shapes[f"{prefix}.{name}.weight"] = (outputs, inputs)
                if bias:
                    shapes[f"{prefix}.{name}.bias"] = (outputs,)
            for name, size in norms.items():
                shapes[f"{prefix}.{name}.weight"] = (size,)
        return shapes
