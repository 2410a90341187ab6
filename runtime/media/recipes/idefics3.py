"""Idefics3 (arXiv 2408.12637) and SmolVLM: an image becomes square tiles, and a small copy of the whole, each with the
same number of tokens and with tokens between them that tell row and column."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from protos.inference_pb2 import ITEM_KIND_IMAGE, ItemKind
from runtime.media.recipes.preprocessor import check_steps, read_preprocessor
from runtime.media.recipes.recipe import ItemSize, Layout, Recipe

# Sides are never resized to more.
_MAX_SIDE = 4096
# More rows or columns than any model has: a recipe has the tokens of each pair.
_MAX_TILES_OF_SIDE = 32

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes in pixels as (height, width). rows, columns: of tiles; 0: the image is one tile."""

    # What the image is resized to first, and then.
    first: tuple[int, int]
    second: tuple[int, int]
    rows: int
    columns: int

    @property
    def num_tiles(self) -> int:
        """The copy of the whole counts."""
        return self.rows * self.columns + 1


@dataclass(frozen=True, slots=True)
class Idefics3Recipe(Recipe):
    image_token: int
    # Pixels of a tile's side, and embeddings of a tile.
    tile_size: int
    tile_embeddings: int
    # Pixels of the longer side that images are resized to before they are split.
    longest_edge: int
    splits: bool
    # Token ids of texts: around a tile, before the copy of the whole, at the end of a row, at the end of the last row,
    # and before a tile by row and column.
    around: tuple[int, ...]
    whole: tuple[int, ...]
    row_end: tuple[int, ...]
    last_row_end: tuple[int, ...]
    places: tuple[tuple[tuple[int, ...], ...], ...]

    name = "idefics3"

    def __post_init__(self) -> None:
        for field in ("tile_size", "tile_embeddings", "longest_edge"):
            if not 1 <= getattr(self, field) <= 1 << 16:
                raise ValueError(f"{field}={getattr(self, field)!r} must be 1 to 65536")
        if self.splits and len(self.places) < self.max_tiles_of_side:
            raise ValueError(f"places has {len(self.places)} rows: {self.max_tiles_of_side} are needed")

    @classmethod
    def of_files(cls, raw: Mapping[str, Any], directory: Path, encode: Encode) -> "Idefics3Recipe":
        """Reads a recipe from a model's files. raw: config.json. encode: returns a text's token ids, without special
        ones around them. Raises ValueError for unsupported values."""
        vision, settings = raw.get("vision_config") or {}, read_preprocessor(directory, "image")
        check_steps(settings)
        image_size, patch_size = int(vision.get("image_size", 224)), int(vision.get("patch_size", 32))
        tile_size = int((settings.get("max_image_size") or {}).get("longest_edge", 364))
        if tile_size != image_size:
            raise ValueError(
                f"max_image_size={tile_size} of preprocessor_config.json differs from image_size={image_size} of "
                "config.json: they must be equal"
            )
        scale = int(raw.get("scale_factor", 2))
        if image_size // patch_size % scale:
            raise ValueError(f"scale_factor={scale} does not divide the {image_size // patch_size} patches of a side")
        size = settings.get("size") or {"longest_edge": 4 * 364}
        if "longest_edge" not in size:
            raise ValueError(f"size={size} of preprocessor_config.json is not supported; longest_edge is")
        longest, splits = int(size["longest_edge"]), bool(settings.get("do_image_splitting", True))
        count = _tiles_of_side(longest, tile_size) if splits else 0
        if count > _MAX_TILES_OF_SIDE:
            raise ValueError(
                f"size longest_edge={longest} makes {count} tiles a row; {_MAX_TILES_OF_SIDE} are possible"
            )

        def ids(text: str) -> tuple[int, ...]:
            return tuple(encode(text))

        return cls(
            image_token=int(raw.get("image_token_id", 128257)),
            tile_size=tile_size,
            tile_embeddings=(image_size // patch_size // scale) ** 2,
            longest_edge=longest,
            splits=splits,
            around=ids("<fake_token_around_image>"),
            whole=ids("<global-img>"),
            row_end=ids("\n"),
            # The end of the last row, and an empty line: both newlines stand together.
            last_row_end=ids("\n\n"),
            places=tuple(
                tuple(ids(f"<row_{row}_col_{column}>") for column in range(1, count + 1)) for row in range(1, count + 1)
            ),
        )

    @property
    def max_tiles_of_side(self) -> int:
        return _tiles_of_side(self.longest_edge, self.tile_size) if self.splits else 0

    def placeholder(self, kind: ItemKind) -> int | None:
        """See Recipe. Videos are not supported: the model takes them as many images with their times as text."""
        return self.image_token if kind == ITEM_KIND_IMAGE else None

    def embedded(self, kind: ItemKind) -> int:
        """See Recipe."""
        return self.image_token

    def layout(self, size: ItemSize) -> Layout:
        """See Recipe."""
        tiling = self.tiling(size)
        tile = (self.image_token,) * self.tile_embeddings
        token_ids: list[int] = []
        for row in range(tiling.rows):
            for column in range(tiling.columns):
                token_ids += (*self.around, *self.places[row][column], *tile)
            token_ids += self.last_row_end if row + 1 == tiling.rows else self.row_end
        token_ids += (*self.around, *self.whole, *tile, *self.around)
        return Layout(token_ids=token_ids, num_embeddings=tiling.num_tiles * self.tile_embeddings)

    def tiling(self, size: ItemSize) -> Tiling:
        """Returns how an image is resized and split. Raises ValueError for options that this recipe does not have."""
        if size.kind != ITEM_KIND_IMAGE:
            raise ValueError("the model takes no videos: send frames as images")
        for name in ("min_pixels", "max_pixels"):
            if getattr(size, name) is not None:
                raise ValueError(f"{name}={getattr(size, name)} has no meaning for this model: leave it out")
        if min(size.height, size.width) < 1:
            raise ValueError(f"an image of {size.width} x {size.height} pixels is empty: both sides need at least one")
        first = _bounded(*_stretched(size.height, size.width, self.longest_edge))
        tile = self.tile_size
        if not self.splits:
            return Tiling(first, (tile, tile), 0, 0)
        second = _to_multiples(*first, tile)
        rows, columns = (side // tile for side in second)
        return Tiling(first, second, 0, 0) if rows * columns == 1 else Tiling(first, second, rows, columns)

    def as_json(self) -> dict[str, Any]:
        """See Recipe."""
        return asdict(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Idefics3Recipe":
        """See Recipe."""
        try:
            texts = {name: tuple(values[name]) for name in ("around", "whole", "row_end", "last_row_end")}
            places = tuple(tuple(tuple(ids) for ids in row) for row in values["places"])
            return cls(**{**values, **texts, "places": places})
        except (KeyError, TypeError) as error:
            raise ValueError(f"the recipe {cls.name} is damaged: {error}") from None


def _tiles_of_side(longest_edge: int, tile_size: int) -> int:
    return -(-min(longest_edge + 1, _MAX_SIDE) // tile_size)


def _stretched(height: int, width: int, longest: int) -> tuple[int, int]:
    """Makes the longer side `longest`, the shorter one even (transformers' _resize_output_size_rescale_to_max_len)."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        height, width = longest, int(longest * ratio)
        width += width % 2
    return max(height, 1), max(width, 1)


def _bounded(height: int, width: int) -> tuple[int, int]:
    ratio = width / height
    if width >= height and width > _MAX_SIDE:
        width, height = _MAX_SIDE, int(_MAX_SIDE / ratio)
    elif height > width and height > _MAX_SIDE:
        height, width = _MAX_SIDE, int(_MAX_SIDE * ratio)
    return max(height, 1), max(width, 1)


def _to_multiples(height: int, width: int, tile: int) -> tuple[int, int]:
    """Rounds the longer side up to whole tiles, then the shorter one in proportion (transformers'
    resize_for_vision_encoder)."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = math.ceil(int(width / ratio) / tile) * tile
    else:
        height = math.ceil(height / tile) * tile
        width = math.ceil(int(height * ratio) / tile) * tile
    return height, width
