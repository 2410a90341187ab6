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

# An item and its number of embeddings, which is that of its tokens.
_Found = tuple[int, ItemSize]


def largest(recipe: Qwen2VLRecipe, limits: ItemLimits, options: ProcessorOptions, most_tokens: int) -> ItemSize | None:
    """See worker.encoders.encoder.Encoder.largest. Raises ValueError for options that contradict the recipe."""
    found: list[_Found] = []
    for kind, limit in ((ITEM_KIND_IMAGE, limits.image), (ITEM_KIND_VIDEO, limits.video)):
        if limit.count:
            found += _of_kind(recipe, limit, kind, options, most_tokens)
    if not found:
        return None
    fitting = [each for each in found if each[0] <= most_tokens]
    return (max(fitting, key=_count) if fitting else min(found, key=_count))[1]


def _count(found: _Found) -> int:
    return found[0]


def _of_kind(
    recipe: Qwen2VLRecipe, limit: ItemLimit, kind: ItemKind, options: ProcessorOptions, most_tokens: int
) -> Iterator[_Found]:
    """Yields items, the largest that fits among them, and the smallest one. Of two videos as long as the largest one,
    one may have more frames, and the other larger ones."""
    most_frames = (limit.num_frames or DEFAULT_FRAMES) if kind == ITEM_KIND_VIDEO else 1
    depth, best = recipe.temporal_patch_size, 0
    for times in range(-(-most_frames // depth), 0, -1):
        num_frames = min(times * depth, most_frames)
        # Rounded down to whole tokens of a frame, fewer frames can have more embeddings together.
        if times > 1 and times * (most_tokens // times) <= best:
            continue
        counts: list[int] = []
        for width, height in _candidates(recipe, limit, kind, options, most_tokens // times):
            size = _size(kind, width, height, num_frames, options)
            rows, columns = (side // recipe.side for side in recipe.resized(size))
            counts.append(times * rows * columns)
            yield counts[-1], size
        best = max([best, *(count for count in counts if count <= most_tokens)])
        if max(counts) <= most_tokens and times * _most_of_frame(recipe, kind, options) <= most_tokens:
            # No size is left out for want of room, so fewer frames have fewer embeddings.
            return


def _most_of_frame(recipe: Qwen2VLRecipe, kind: ItemKind, options: ProcessorOptions) -> int:
    return recipe.bounds(_size(kind, 1, 1, 1, options)).most // recipe.side**2


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
    recipe: Qwen2VLRecipe, limit: ItemLimit, kind: ItemKind, options: ProcessorOptions, most_tokens: int
) -> Iterator[tuple[int, int]]:
    """Yields widths and heights within the limit, one of which has the most embeddings up to most_tokens.

    Sizes within the bounds of pixels are rounded to whole tokens, so the largest is the limit itself, or has the most
    whole tokens below max_pixels or most_tokens. Smaller images grow to min_pixels and are rounded up: narrow ones
    most.
    """
    side = recipe.side
    most_width, most_height = limit.width or 1 << 16, limit.height or 1 << 16
    if max(most_width, most_height) <= _RATIOS * min(most_width, most_height):
        yield most_width, most_height
    most = min(_most_of_frame(recipe, kind, options), most_tokens)
    # The most square one of those with as many tokens comes first.
    for short in range(isqrt(most), 0, -1):
        long = min(most // short, _RATIOS * short)
        for columns, rows in ((long, short), (short, long)):
            # The limit is rounded to whole tokens, too, up or down.
            width, height = min(columns * side, most_width), min(rows * side, most_height)
            if max(width, height) <= _RATIOS * min(width, height):
                yield width, height
    for ratio in range(1, _RATIOS + 1):
        for width, height in ((ratio, 1), (1, ratio)):
            if width <= most_width and height <= most_height:
                yield width, height
