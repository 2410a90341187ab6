"""Which class computes an architecture."""

from collections.abc import Mapping
from typing import Protocol

import torch

from kernels.compute_path import ComputePath
from kernels.linear import PackedLinear
from worker.input_batch import InputBatch
from worker.kv_cache import KVCache
from worker.model_config import ModelConfig
from worker.models.llama import LlamaModel
from worker.take_tensor import Shape, TakeTensor


class Model(Protocol):
    """What a worker needs of a model. Calls come one at a time; nothing wants gradients."""

    config: ModelConfig
    # How it computes: names the arithmetic for a replica's numerics fingerprint, and says the dtype of a KV cache that
    # attention reads as it is.
    path: ComputePath
    # The output head, with the norm before it.
    head: PackedLinear

    def __init__(self, config: ModelConfig, take: TakeTensor, dtype: torch.dtype) -> None: ...

    @staticmethod
    def tensor_shapes(config: ModelConfig) -> Mapping[str, Shape]:
        """The tensors it takes, by their Hugging Face names."""
        ...

    @property
    def weight_bytes(self) -> int:
        """That embeddings and linear layers take in memory."""
        ...

    def forward(self, batch: InputBatch, kv_cache: KVCache) -> torch.Tensor:
        """Writes the batch's KV and gives hidden_TE, to pick rows of for `logits`."""
        ...

    def logits(self, hidden_SE: torch.Tensor) -> torch.Tensor:
        """float32 [S, vocab_size] from rows of `forward`'s result."""
        ...

    def greedy(self, batch: InputBatch, kv_cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the batch's KV and gives the likeliest token after each of its logit_indices (int64 [S]) and its logit
        (float32 [S]), bit for bit what kernels.sampling.greedy says of `logits`."""
        ...


_CLASSES: dict[str, type[Model]] = dict.fromkeys(
    ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"), LlamaModel
)


def model_class(architecture: str) -> type[Model]:
    """The class for one of worker.model_config.ARCHITECTURES."""
    return _CLASSES[architecture]
