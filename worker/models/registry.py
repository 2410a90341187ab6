"""Which class computes an architecture."""

from collections.abc import Mapping
from typing import Protocol, overload

import torch

from kernels.backend import Backend
from kernels.linear import PackedLinear, Residual, Stream
from worker.layers.forward_context import ExpertLoad, Pieces
from worker.layers.kv_cache import KVCache
from worker.model_config import ModelConfig
from worker.models.deepseek.model import DeepseekModel
from worker.models.gemma3.model import Gemma3Model
from worker.models.llama.model import LlamaModel
from worker.models.llama4.model import Llama4Model
from worker.models.mixtral.model import MixtralModel, Qwen3MoeModel
from worker.parallel.groups import Groups
from worker.step.batch import GpuBatch, InputBatch
from worker.weights.reader import Shape, WeightReader


class Model(Protocol):
    """What a worker needs of a model. Calls come one at a time; nothing wants gradients."""

    config: ModelConfig
    # How it computes: names the arithmetic for a replica's numerics fingerprint, and says the dtype of a KV cache that
    # attention reads as it is.
    path: Backend
    # Whom it computes with.
    groups: Groups
    # Of a model with experts, on a CPU.
    expert_load: ExpertLoad | None

    def __init__(self, config: ModelConfig, take: WeightReader, path: Backend) -> None: ...

    @classmethod
    def tensor_shapes(cls, config: ModelConfig) -> Mapping[str, Shape]:
        """The tensors it takes, by their Hugging Face names."""
        ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def head(self) -> PackedLinear:
        """The output head, with the norm before it. Of the last stage, as `logits` and `greedy` are."""
        ...

    @property
    def weight_bytes(self) -> int:
        """That embeddings and linear layers take in memory."""
        ...

    def incoming(self, num_tokens: int) -> torch.Tensor:
        """On a CPU, of a stage that is not the first: where its next step, of so many tokens, finds what `forward` gave
        the stage before; float32 [T, E], to be written before that step."""
        ...

    def reserve(self, *, max_tokens: int, max_rows: int, max_context: int) -> None:
        """On a GPU, before all steps: takes the memory for them."""
        ...

    @overload
    def forward(self, batch: InputBatch, kv_cache: KVCache) -> torch.Tensor: ...
    @overload
    def forward(self, batch: GpuBatch, kv_cache: KVCache, pieces: Pieces | None = None) -> Residual: ...
    def forward(self, batch: InputBatch | GpuBatch, kv_cache: KVCache, pieces: Pieces | None = None) -> Stream:
        """Writes the batch's KV and gives hidden_TE, to pick rows of for `logits`. pieces: on a GPU."""
        ...

    def logits(self, hidden_SE: Stream, out: torch.Tensor | None = None) -> torch.Tensor:
        """[S, vocab_size] from rows of `forward`'s result: float32, on a GPU of the compute dtype. out: memory for
        them, on a GPU."""
        ...

    def greedy(self, batch: InputBatch, kv_cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the batch's KV and gives the likeliest token after each of its logit_indices (int64 [S]) and its logit
        (float32 [S]), bit for bit what kernels.sampling.greedy says of `logits`."""
        ...


_CLASSES: dict[str, type[Model]] = {
    "DeepseekV2ForCausalLM": DeepseekModel,
    "DeepseekV3ForCausalLM": DeepseekModel,
    "Gemma3ForCausalLM": Gemma3Model,
    "Llama4ForCausalLM": Llama4Model,
    "Llama4ForConditionalGeneration": Llama4Model,
    "LlamaForCausalLM": LlamaModel,
    "MistralForCausalLM": LlamaModel,
    "MixtralForCausalLM": MixtralModel,
    "Qwen2ForCausalLM": LlamaModel,
    "Qwen3ForCausalLM": LlamaModel,
    "Qwen3MoeForCausalLM": Qwen3MoeModel,
}


def model_class(architecture: str) -> type[Model]:
    """The class for one of worker.model_config.ARCHITECTURES."""
    return _CLASSES[architecture]
