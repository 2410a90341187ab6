"""Finds the image or video with the most embeddings that limits allow, to reserve memory for."""

from collections.abc import Iterator
from math import isqrt

from configs.groups.media import ItemLimit, ItemLimits, ProcessorOptions
from protos.inference_pb2 import ITEM_KIND_IMAGE, ITEM_KIND_VIDEO, ItemKind
from runtime.media.recipes.qwen2_vl import Qwen2VLRecipe
from runtime.media.recipes.recipe import ItemSize

# Frames of the longest video, where limits don't say.
DEFAULT_FRAMES = 16
# Ratios of an image's sides, from 1 on; the recipe takes no others.
_RATIOS = 200


def largest(recipe: Qwen2VLRecipe, limits: ItemLimits, options: ProcessorOptions) -> ItemSize | None:
    """Returns None if the limits allow no item. Raises ValueError for options that contradict the recipe."""
    found: list[tuple[int, ItemSize]] = []
    for kind, limit in ((ITEM_KIND_IMAGE, limits.image), (ITEM_KIND_VIDEO, limits.video)):
        if not limit.count:
            continue
        num_frames = (limit.num_frames or DEFAULT_FRAMES) if kind == ITEM_KIND_VIDEO else 1
        for width, height in _candidates(recipe, limit, kind, options):
            size = _size(kind, width, height, num_frames, options)
            rows, columns = (side // recipe.side for side in recipe.resized(size))
            found.append((-(-num_frames // recipe.temporal_patch_size) * rows * columns, size))
    return max(found, key=lambda each: each[0])[1] if found else None


def _size(kind: ItemKind, width: int, height: int, num_frames: int, options: ProcessorOptions) -> ItemSize:
    return ItemSize(
        kind=kind,
        width=width,
        height=height,
        num_frames=num_frames,
        min_pixels=options.min_pixels,
        max_pixels=options.max_pixels,
    )


def _candidates(
    recipe: Qwen2VLRecipe, limit: ItemLimit, kind: ItemKind, options: ProcessorOptions
) -> Iterator[tuple[int, int]]:
    """Yields widths and heights within the limit, one of which has the most embeddings.

    Sizes within the bounds of pixels are rounded to whole tokens, so the largest is the limit itself, or has the most
    whole tokens below max_pixels. Smaller images grow to min_pixels and are rounded up: narrow ones most.
    """
    most_width, most_height = limit.width or 1 << 16, limit.height or 1 << 16
    if max(most_width, most_height) <= _RATIOS * min(most_width, most_height):
        yield most_width, most_height
    most = recipe.bounds(_size(kind, 1, 1, 1, options)).most // recipe.side**2
    for short in range(1, isqrt(most) + 1):
        if most // short <= _RATIOS * short:
            for columns, rows in ((most // short, short), (short, most // short)):
                if columns * recipe.side <= most_width and rows * recipe.side <= most_height:
                    yield columns * recipe.side, rows * recipe.side
    for ratio in range(1, _RATIOS + 1):
        for width, height in ((ratio, 1), (1, ratio)):
            if width <= most_width and height <= most_height:
                yield width, height
