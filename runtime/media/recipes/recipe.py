"""A recipe says how a model's images and videos become tokens. Routers count with it, workers compute by it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from protos.inference_pb2 import ItemKind


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemSize:
    """An item as its files say, after the rotation that their EXIF data asks for."""

    kind: ItemKind
    # Pixels; the frames of a video have one size.
    width: int
    height: int
    num_frames: int = 1
    frames_per_second: float = 0.0
    # As ItemOptions or mm_processor_kwargs say; None: the recipe's own.
    min_pixels: int | None = None
    max_pixels: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The tokens that stand for an item; see protos/inference.proto: ItemSpan."""

    token_ids: Sequence[int]
    # How many of token_ids are `Recipe.embedded`.
    num_embeddings: int
    grid: tuple[int, ...] = ()
    time_step: float = 0.0


class Recipe(ABC):
    # In JSON, and in REGISTRY.
    name: str

    @abstractmethod
    def placeholder(self, kind: ItemKind) -> int | None:
        """Returns the token that stands for an item in a prompt before it is expanded; None: the model takes none."""

    @abstractmethod
    def embedded(self, kind: ItemKind) -> int:
        """Returns the token of a Layout that an embedding replaces."""

    @abstractmethod
    def layout(self, size: ItemSize) -> Layout:
        """Returns the tokens that replace the placeholder. Raises ValueError, which says what would work, for a size
        that the model can't take, such as an extreme ratio of its sides."""

    @abstractmethod
    def as_json(self) -> dict[str, Any]:
        """Returns what `of` makes an equal recipe from; numbers and texts only."""

    @classmethod
    @abstractmethod
    def of(cls, values: Mapping[str, Any]) -> "Recipe":
        """Makes a recipe from what `as_json` returned. Raises ValueError."""
