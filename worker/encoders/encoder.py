"""The interface of encoders: what makes embeddings of images and videos for a language model."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from configs.groups.media import ItemLimits
from protos.inference_pb2 import ITEM_KIND_IMAGE, ItemData, ItemKind
from runtime.media.recipes.recipe import ItemSize, Recipe
from worker.parallel.groups import Alone, Group


class ItemError(ValueError):
    """An item's files can't be decoded; the message is for the client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pixels:
    """An encoder's input: an item's frames after they were resized. They become numbers of the tower's dtype piece by
    piece, on the tower's device: as float32 patches they would take 4 to 8 times the memory."""

    # uint8, [F, height, width, 3].
    frames: torch.Tensor
    num_embeddings: int
    kind: ItemKind = ITEM_KIND_IMAGE
    # Embeddings along time, height and width, if they form a grid.
    grid: tuple[int, int, int] = (0, 0, 0)

    @property
    def num_bytes(self) -> int:
        """Bytes that it holds until the item is encoded."""
        return self.frames.nbytes


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
    def prepare(self, data: ItemData) -> Pixels:
        """Decodes an item's files and makes the encoder's input of them. Safe on any thread. Raises ItemError."""

    @abstractmethod
    def encode(self, prepared: Pixels) -> torch.Tensor:
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
    def dummy(self, size: ItemSize) -> Pixels:
        """Returns an input of that size, without files, to measure memory with. Raises ValueError for sizes that the
        recipe refuses."""
