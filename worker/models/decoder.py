"""The parts that decoder models share: embeddings, blocks, a head. Each device has its own executor for them.

Legend: T tokens of the step, E hidden size.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from kernels.backend import Backend
from kernels.linear import Stream
from worker.layers.attention import QueryTemperature
from worker.layers.embedding import Embedding
from worker.layers.forward_context import current
from worker.layers.head import OutputHead
from worker.layers.linear import load_head
from worker.layers.residual import Layer, ResidualStream
from worker.layers.rotary import Rotary
from worker.model_config import ModelConfig
from worker.weights.reader import NormsPlusOne, Shape, WeightReader

# Tensors outside of layers, in all families.
EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class Block(ABC):
    """One layer of a model: attention and an MLP, or what takes their places.

    Its Layers and norms are attributes. `forward` is its formula over them; worker.layers.residual says how it is
    computed.
    """

    @abstractmethod
    def __init__(self, config: ModelConfig, layer: int, prefix: str, reader: WeightReader, backend: Backend) -> None:
        """prefix: of its tensors, such as model.layers.3."""

    @classmethod
    @abstractmethod
    def shapes(cls, config: ModelConfig, layer: int, prefix: str) -> dict[str, Shape]:
        """Returns the shapes of the tensors that the constructor reads, by their Hugging Face names."""

    @abstractmethod
    def forward(self, x: ResidualStream) -> ResidualStream:
        """Adds to the stream. Called within a ForwardContext."""

    @property
    def weight_bytes(self) -> int:
        return sum(part.weight_bytes for part in vars(self).values() if isinstance(part, Layer))


class Model(ABC):
    """A decoder model, or one stage of it, as executors run it. The hidden states between stages are float32."""

    config: ModelConfig
    backend: Backend
    rotary: Rotary
    query_temperature: QueryTemperature

    @abstractmethod
    def __init__(self, config: ModelConfig, reader: WeightReader, backend: Backend) -> None:
        """Raises ValueError, before it reads any tensor, if the backend's ranks or stages do not divide the model."""

    @classmethod
    @abstractmethod
    def tensor_shapes(cls, config: ModelConfig) -> dict[str, Shape]:
        """Returns the shapes of a checkpoint's tensors, by the names that the model's files present."""

    @property
    @abstractmethod
    def is_recordable(self) -> bool:
        """True if a step on a CPU is a list of kernel calls that is the same for any number of tokens; see
        worker.cpu.executor.Replay."""

    @property
    @abstractmethod
    def embedding(self) -> Embedding | None:
        """None: another stage has it."""

    @property
    @abstractmethod
    def head(self) -> OutputHead: ...

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes that embeddings and linear layers take in memory."""

    @property
    def narrows(self) -> bool:
        """True if `forward` goes by ForwardContext.wanted."""
        return False

    def rows_for(self, num_tokens: int) -> int:
        """Returns how many rows of the workspace a step of num_tokens tokens takes."""
        return num_tokens

    @abstractmethod
    def forward(self, token_ids_T: torch.Tensor) -> Stream:
        """Returns the hidden states after this stage's last layer: the workspace's "residual", or, if the context says
        which tokens are wanted, theirs alone, in its "wanted stream". Called within a ForwardContext."""


class Decoder(Model):
    """A model of an own family. The residual stream is float32 whatever dtype the weights have: adding to it in place
    costs no more and rounds less."""

    # The class of its layers.
    block: ClassVar[type[Block]]

    def __init__(self, config: ModelConfig, reader: WeightReader, backend: Backend) -> None:
        """See Model."""
        layers = backend.stage.layers(config.num_layers)
        self.config, self.backend = config, backend
        reader = adapted(config, reader)
        self._embed = (
            Embedding(reader(EMBEDDING), backend, scale=config.embedding_scale, divisor=config.residual_multiplier)
            if backend.stage.is_first
            else None
        )
        self.rotary = Rotary(config.ropes, config.rope_size, backend, config.rotary_width, config.mrope_section)
        self.query_temperature = QueryTemperature(config, backend)
        self._first_layer = layers.start
        self._blocks = [self.block(config, layer, _prefix(layer), reader, backend) for layer in layers]
        self._head = self._load_head(config, reader, backend) if backend.stage.is_last else None

    @classmethod
    def tensor_shapes(cls, config: ModelConfig) -> dict[str, Shape]:
        """Returns shapes by Hugging Face names."""
        shapes: dict[str, Shape] = {EMBEDDING: (config.vocab_size, config.hidden_size), NORM: (config.hidden_size,)}
        if not config.tie_word_embeddings:
            shapes[HEAD] = (config.vocab_size, config.hidden_size)
        for layer in range(config.num_layers):
            shapes |= cls.block.shapes(config, layer, _prefix(layer))
        return shapes

    @property
    def is_recordable(self) -> bool:
        # The calls of experts depend on their tokens, PyTorch computes the norms of latents and projections, gates of
        # attention are no recorded call, and ranks communicate within a step.
        config, backend = self.config, self.backend
        has_own_calls = config.experts is not None or config.latent is not None or config.projection_norm
        return not has_own_calls and not config.attention_gate and backend.shard.size == 1

    @property
    def narrows(self) -> bool:
        if not self._blocks or self._head is None or self.config.has_state(self.config.num_layers - 1):
            # A state needs all tokens of its layer.
            return False
        return self.is_recordable

    @property
    def embedding(self) -> Embedding | None:
        return self._embed

    @property
    def head(self) -> OutputHead:
        assert self._head is not None, "only the last stage has a head"
        return self._head

    @property
    def weight_bytes(self) -> int:
        ends = sum(each.num_bytes for each in (self._embed, self._head) if each is not None)
        return ends + sum(block.weight_bytes for block in self._blocks)

    def forward(self, token_ids_T: torch.Tensor) -> Stream:
        """See Model."""
        context = current()
        workspace = context.workspace
        if self._embed is not None:
            x_TE = self._embed(token_ids_T, workspace)
            if context.embedded is not None:
                self._embed.replace(x_TE, context.embedded)
        else:
            # The previous stage's result; the caller has put it there.
            x_TE = workspace.take("residual", len(token_ids_T), self.config.hidden_size, dtype=torch.float32)
        x = ResidualStream(x_TE)
        for layer, block in enumerate(self._blocks, self._first_layer):
            context.keep_states(layer, x.values)
            if context.wanted is not None and block is self._blocks[-1]:
                x = ResidualStream(x.values, context.wanted)
            x = block.forward(x)
        context.keep_states(self._first_layer + len(self._blocks), x.values)
        return x.values

    @staticmethod
    def _load_head(config: ModelConfig, reader: WeightReader, backend: Backend) -> OutputHead:
        linear = load_head(
            reader,
            EMBEDDING if config.tie_word_embeddings else HEAD,
            backend=backend,
            norm=NORM,
            eps=config.rms_norm_eps,
            outputs=backend.shard.covering(config.vocab_size, "vocab_size") if backend.shard.size > 1 else None,
            scaling=config.logits_scaling,
            soft_cap=config.logits_soft_cap,
        )
        return OutputHead(linear, config.vocab_size, backend)


def adapted(config: ModelConfig, reader: WeightReader) -> WeightReader:
    """Returns the reader that layers read from: one that converts tensors, where checkpoints differ."""
    return NormsPlusOne(reader) if config.norms_lack_one else reader


def _prefix(layer: int) -> str:
    return f"model.layers.{layer}"
