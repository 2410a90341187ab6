"""A model without weights: its logits are a hash of the tokens that its attention sees.

It writes each token into its slot of the KV cache and reads the context back through the block tables, so that a wrong
slot, block table, position or context length changes what is sampled.
"""

from collections.abc import Callable

import numpy as np
import torch

from kernels.backend import torch_backend
from kernels.sampling import TokenMasks, apply_masks, greedy
from worker.cpu.executor import CpuExecutor
from worker.layers.kv_cache import KVCache
from worker.model_config import ModelConfig, RopeConfig
from worker.parallel.groups import Groups
from worker.step.batch import InputBatch

VOCAB_SIZE = 101
# A prompt with this token gives logits that are not finite.
POISON = 100


def fake_config(**changes: object) -> ModelConfig:
    """One layer, one head of size 2: a token's "key" is its id and its position."""
    values: dict[str, object] = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 2,
        "intermediate_size": 2,
        "num_layers": 1,
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_size": 2,
        "rope": RopeConfig(theta=10000.0),
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "layer_windows": (0,),
        "eos_token_ids": frozenset({2}),
    }
    return ModelConfig(**{**values, **changes})  # type: ignore[arg-type]


class FakeModel(CpuExecutor):
    """Its hidden states: [hash of the context up to the token, 1 if that context holds POISON]."""

    backend = torch_backend(torch.float32)
    groups = Groups()
    hidden_size = 2

    def __init__(self) -> None:
        """It has no decoder."""

    def forward(self, batch: InputBatch, kv_cache: KVCache) -> torch.Tensor:
        cache = kv_cache.layers[0].view(-1, 2, 1, 2)
        cache[batch.slots_T, 0, 0] = torch.stack((batch.token_ids_T.float(), batch.positions_T.float()), -1)
        hidden = []
        for row in range(batch.num_rows):
            context_len = int(batch.context_lens_S[row])
            positions = np.arange(context_len)
            blocks = batch.block_tables_SB[row, positions // kv_cache.block_size].astype(np.int64)
            context = cache[torch.from_numpy(blocks * kv_cache.block_size + positions % kv_cache.block_size), 0, 0]
            start, end = batch.query_starts[row : row + 2]
            assert context[:, 1].tolist() == positions.tolist(), "the cache does not hold the context"
            for length in range(context_len - int(end - start) + 1, context_len + 1):
                hidden.append(context_hash(context[:length, 0].long().tolist()))
        return torch.tensor(hidden, dtype=torch.float64)

    def incoming(self, num_tokens: int) -> torch.Tensor:
        raise AssertionError("it has one stage")

    def wanted(self, batch: InputBatch, kv_cache: KVCache) -> torch.Tensor:
        return self.forward(batch, kv_cache)[batch.logit_indices]

    def logits(self, hidden_SE: torch.Tensor) -> torch.Tensor:
        return hidden_logits(hidden_SE)

    def greedy(self, batch: InputBatch, kv_cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
        logits_LV = hidden_logits(self.wanted(batch, kv_cache))
        token_ids_L, largest_L = greedy(logits_LV.numpy())
        return torch.from_numpy(token_ids_L), torch.from_numpy(largest_L)

    def masked_greedy(
        self, batch: InputBatch, kv_cache: KVCache, masks: Callable[[], TokenMasks]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits_LV = hidden_logits(self.wanted(batch, kv_cache)).numpy()
        apply_masks(logits_LV, masks())
        token_ids_L, largest_L = greedy(logits_LV)
        return torch.from_numpy(token_ids_L), torch.from_numpy(largest_L)


def context_hash(tokens: list[int]) -> tuple[int, bool]:
    value = 17
    for token in tokens:
        value = (value * 1_000_003 + token) % 2**31
    return value, POISON in tokens


def hidden_logits(hidden_SE: torch.Tensor) -> torch.Tensor:
    return torch.stack([context_logits(int(seed), bool(poisoned)) for seed, poisoned in hidden_SE.tolist()])


def context_logits(seed: int, poisoned: bool = False) -> torch.Tensor:
    if poisoned:
        return torch.full((VOCAB_SIZE,), float("nan"))
    return torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 2


def logits_after(tokens: list[int]) -> torch.Tensor:
    """The model's logits after these tokens."""
    return context_logits(*context_hash(tokens))
