"""The interface of encoders: what makes embeddings of images and videos for a language model."""

from abc import ABC, abstractmethod
from typing import Protocol

import torch

from configs.groups.media import ItemLimits
from protos.inference_pb2 import ItemData
from runtime.media.recipes.recipe import ItemSize, Recipe
from worker.parallel.groups import Alone, Group


class ItemError(ValueError):
    """An item's files can't be decoded; the message is for the client."""


class Prepared(Protocol):
    """An encoder's input: pixels of one item."""

    @property
    def num_embeddings(self) -> int: ...

    @property
    def num_bytes(self) -> int:
        """Bytes that it holds until the item is encoded."""
        ...


class Encoder(ABC):
    """A vision tower and what leads from it to the language model. An item's embeddings do not depend on what else is
    encoded."""

    recipe: Recipe
    # Width of embeddings: the language model's hidden size.
    hidden_size: int
    # Bytes that the weights take in memory.
    weight_bytes: int
    # The ranks that share each layer, all of which encode the same items in the same order. The tensor group of the
    # epoch; runners set it.
    group: Group = Alone()

    @abstractmethod
    def prepare(self, data: ItemData) -> Prepared:
        """Decodes an item's files and makes the encoder's input of them. Safe on any thread. Raises ItemError."""

    @abstractmethod
    def encode(self, prepared: Prepared) -> torch.Tensor:
        """Returns float32 [num_embeddings, hidden_size]. Called on the step's thread, in no ForwardContext."""

    @abstractmethod
    def workspace_bytes(self, size: ItemSize) -> int:
        """Returns the bytes that `encode` takes, at most, for an item of this size, beside its weights and input: on
        CPUs memory is not measured."""

    @abstractmethod
    def largest(self, limits: ItemLimits, most_tokens: int) -> ItemSize | None:
        """Returns the item with the most embeddings among those that the limits allow and that have at most most_tokens
        tokens; if none has so few, the smallest one. None: the limits allow no item."""

    @abstractmethod
    def dummy(self, size: ItemSize) -> Prepared:
        """Returns an input of that size, without files, to measure memory with. Raises ValueError for sizes that the
        recipe refuses."""
