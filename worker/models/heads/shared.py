"""The tensors that a head shares with its target: the embeddings, the output head, the last norm.

They are the target's own tensors where this rank has them whole; another rank or stage reads them again.
"""

from dataclasses import dataclass, replace

import torch

from kernels.backend import Backend
from kernels.linear import PackedLinear
from kernels.shard import ALL_LAYERS, NOT_SHARED, WHOLE
from worker.layers.embedding import Embedding
from worker.layers.norm import Norm
from worker.models.decoder import EMBEDDING, HEAD, NORM, Decoder
from worker.weights.reader import WeightReader


def backend_of_heads(backend: Backend) -> Backend:
    """Returns the backend that computes heads: the target's, with whole layers on this rank."""
    return replace(backend, shard=WHOLE, stage=ALL_LAYERS, experts=NOT_SHARED)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedParts:
    """target: the model. reader: of its checkpoint, as its layers read it."""

    target: Decoder
    reader: WeightReader

    @property
    def _is_whole(self) -> bool:
        return self.target.backend.shard.size == 1

    def embedding(self, backend: Backend) -> Embedding:
        own = self.target.embedding if self._is_whole else None
        return own or Embedding(self.reader(EMBEDDING), backend, scale=self.target.config.embedding_scale)

    def output(self, norm_E: torch.Tensor | None, eps: float, backend: Backend) -> PackedLinear:
        """Returns the output head behind another norm, or behind none. norm_E: its weights."""
        kept = self.target.head.packed if self._is_whole else None
        if kept is None:
            kept = self.reader.head_weight(EMBEDDING if self.target.config.tie_word_embeddings else HEAD)
        return PackedLinear(kept, None, backend, norm_I=norm_E, eps=eps)

    def last_norm(self, backend: Backend) -> Norm:
        return Norm(NORM.removesuffix(".weight"), self.target.config.rms_norm_eps, self.reader, backend)
