"""Qwen2-VL (arXiv 2409.12191) and Qwen2.5-VL: an image of any size becomes a grid of patches; four of them, two frames
deep, are a token."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from protos.inference_pb2 import ITEM_KIND_IMAGE, ITEM_KIND_VIDEO, ItemKind
from runtime.media.recipes.preprocessor import check_steps, read_preprocessor
from runtime.media.recipes.recipe import ItemSize, Layout, Recipe

# Frames per second of a video that doesn't say.
DEFAULT_FRAMES_PER_SECOND = 2.0
# The longer side divided by the shorter one.
_MAX_RATIO = 200
_MOST = 1 << 30


@dataclass(frozen=True, slots=True)
class PixelBounds:
    """Pixels of an image, or of each frame, after it was resized."""

    least: int
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most <= _MOST:
            raise ValueError(
                f"min_pixels={self.least} and max_pixels={self.most}: both must be 1 to {_MOST}, and min_pixels the "
                "smaller one"
            )


# Those of Qwen2VLImageProcessor and Qwen2VLVideoProcessor.
_IMAGE_BOUNDS = PixelBounds(56 * 56, 28 * 28 * 1280)
_VIDEO_BOUNDS = PixelBounds(128 * 28 * 28, 28 * 28 * 768)


@dataclass(frozen=True, slots=True)
class Qwen2VLRecipe(Recipe):
    image_token: int
    video_token: int
    # Pixels of a patch's side, frames that a patch spans, and patches of a token's side.
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    image: PixelBounds
    video: PixelBounds
    # Positions in time that a second of video spans; 0: each grid row of time is one position after the last.
    tokens_per_second: float

    name = "qwen2_vl"

    def __post_init__(self) -> None:
        for field in ("patch_size", "temporal_patch_size", "merge_size"):
            if not 1 <= getattr(self, field) <= 1024:
                raise ValueError(f"{field}={getattr(self, field)!r} must be 1 to 1024")
        if not 0 <= self.tokens_per_second <= 1000:
            raise ValueError(f"tokens_per_second={self.tokens_per_second!r} must be 0 to 1000")

    @classmethod
    def of_files(cls, raw: Mapping[str, Any], directory: Path) -> "Qwen2VLRecipe":
        """Reads a recipe from a model's files. raw: config.json. Raises ValueError for unsupported values."""
        vision = raw.get("vision_config") or {}
        image, video = read_preprocessor(directory, "image"), read_preprocessor(directory, "video")
        check_steps(image)
        sizes: dict[str, int] = {}
        for field, in_config, default in (
            ("patch_size", "patch_size", 14),
            ("temporal_patch_size", "temporal_patch_size", 2),
            ("merge_size", "spatial_merge_size", 2),
        ):
            sizes[field] = int(vision.get(in_config, default))
            for settings in (image, video):
                if int(settings.get(field, sizes[field])) != sizes[field]:
                    raise ValueError(
                        f"{field}={settings[field]} of preprocessor_config.json differs from {in_config}="
                        f"{sizes[field]} of config.json: they must be equal"
                    )
        return cls(
            image_token=int(raw.get("image_token_id", 151655)),
            video_token=int(raw.get("video_token_id", 151656)),
            image=_bounds(image, _IMAGE_BOUNDS),
            video=_bounds(video, _VIDEO_BOUNDS),
            tokens_per_second=_tokens_per_second(raw, vision),
            **sizes,
        )

    @property
    def side(self) -> int:
        """Pixels of the side of a token."""
        return self.patch_size * self.merge_size

    def placeholder(self, kind: ItemKind) -> int | None:
        """See Recipe."""
        return {ITEM_KIND_IMAGE: self.image_token, ITEM_KIND_VIDEO: self.video_token}.get(kind)

    def embedded(self, kind: ItemKind) -> int:
        """See Recipe."""
        return self.video_token if kind == ITEM_KIND_VIDEO else self.image_token

    def layout(self, size: ItemSize) -> Layout:
        """See Recipe."""
        height, width = self.resized(size)
        rows, columns = height // self.side, width // self.side
        if size.kind == ITEM_KIND_IMAGE:
            count = rows * columns
            return Layout(token_ids=[self.image_token] * count, num_embeddings=count, grid=(1, rows, columns))
        if size.num_frames < 1:
            raise ValueError("a video has no frames: it must have at least one")
        if not 0 <= size.frames_per_second <= 1000:
            raise ValueError(f"frames_per_second={size.frames_per_second} must be 0 (as is common) to 1000")
        times = -(-size.num_frames // self.temporal_patch_size)
        count = times * rows * columns
        step = 1.0
        if self.tokens_per_second:
            seconds = self.temporal_patch_size / (size.frames_per_second or DEFAULT_FRAMES_PER_SECOND)
            step = self.tokens_per_second * seconds
        return Layout(
            token_ids=[self.video_token] * count, num_embeddings=count, grid=(times, rows, columns), time_step=step
        )

    def bounds(self, size: ItemSize) -> PixelBounds:
        """Returns the bounds of an item's pixels. Raises ValueError if they contradict each other."""
        own = self.video if size.kind == ITEM_KIND_VIDEO else self.image
        return PixelBounds(
            own.least if size.min_pixels is None else size.min_pixels,
            own.most if size.max_pixels is None else size.max_pixels,
        )

    def resized(self, size: ItemSize) -> tuple[int, int]:
        """Returns the height and width that an image, or each frame, is resized to: multiples of `side`, within the
        bounds, and nearly in proportion (transformers' smart_resize). Raises ValueError for an extreme ratio of
        sides."""
        height, width, bounds, side = size.height, size.width, self.bounds(size), self.side
        if min(height, width) < 1:
            raise ValueError(f"an image of {width} x {height} pixels is empty: both sides need at least one")
        if max(height, width) / min(height, width) > _MAX_RATIO:
            raise ValueError(
                f"an image of {width} x {height} pixels is too narrow for the model: the longer side may be at most "
                f"{_MAX_RATIO} times the shorter one"
            )
        rows, columns = round(height / side), round(width / side)
        if rows * columns * side * side > bounds.most:
            shrink = math.sqrt(height * width / bounds.most)
            rows = max(1, math.floor(height / shrink / side))
            columns = max(1, math.floor(width / shrink / side))
        elif rows * columns * side * side < bounds.least:
            grow = math.sqrt(bounds.least / (height * width))
            rows, columns = math.ceil(height * grow / side), math.ceil(width * grow / side)
        return rows * side, columns * side

    def as_json(self) -> dict[str, Any]:
        """See Recipe."""
        return asdict(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Qwen2VLRecipe":
        """See Recipe."""
        try:
            bounds = {kind: PixelBounds(**values[kind]) for kind in ("image", "video")}
            return cls(**{**values, **bounds})
        except (KeyError, TypeError) as error:
            raise ValueError(f"the recipe {cls.name} is damaged: {error}") from None


def _bounds(settings: Mapping[str, Any], default: PixelBounds) -> PixelBounds:
    """min_pixels and max_pixels go before the size, in which they have other names since transformers 4.52."""
    size = settings.get("size") or {}

    def first(*values: Any) -> int:
        return int(next(value for value in values if value is not None))

    return PixelBounds(
        first(settings.get("min_pixels"), size.get("shortest_edge"), size.get("min_pixels"), default.least),
        first(settings.get("max_pixels"), size.get("longest_edge"), size.get("max_pixels"), default.most),
    )


def _tokens_per_second(raw: Mapping[str, Any], vision: Mapping[str, Any]) -> float:
    # Qwen2-VL has no such number: its positions in time are those of the grid.
    return float(vision.get("tokens_per_second", 4)) if raw.get("model_type") == "qwen2_5_vl" else 0.0
