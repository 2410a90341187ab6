"""Reads items: from a message to files, and from files to tokens. No pixel is decoded here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from protos import inference_pb2 as pb
from router.errors import InvalidRequest
from router.request.media.asked import AskedItem
from router.request.media.data_urls import decode_data_url, is_data_url
from router.request.media.limits import MediaLimits, frames_per_second
from runtime.media.headers import ImageHeader, read_header
from runtime.media.packed import PackedItem
from runtime.media.recipes.recipe import ItemSize, Layout, Recipe

# Sides of an image that is larger than any that a model looks at as it is.
_LARGE_SIDE = 8192

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class ReadItem:
    packed: PackedItem
    # The tokens that stand for it.
    layout: Layout

    def span(self, first_token: int) -> pb.ItemSpan:
        layout = self.layout
        return pb.ItemSpan(
            name=self.packed.name,
            kind=self.packed.kind,
            first_token=first_token,
            num_tokens=len(layout.token_ids),
            num_embeddings=layout.num_embeddings,
            grid=layout.grid,
            time_step=layout.time_step,
        )


@dataclass(frozen=True, slots=True)
class File:
    """A file as it came. mime_type: empty if none was told."""

    data: bytes
    mime_type: str


def inline_size(image: pb.Image) -> int:
    """Returns about how many bytes the file of an image has that comes with its message. Takes 0.2 ms a MB."""
    # ByteSize would take ten times as long: it serializes. base64 has four characters for three bytes.
    return len(image.data) if image.HasField("data") else len(image.url) * 3 // 4


def inline_file(image: pb.Image, field: str) -> File | str:
    """Returns the file that comes with the message, or the URL to fetch it from. Raises InvalidRequest.

    Takes up to 5 ms a MB: not for an event loop.
    """
    if image.HasField("data"):
        return File(image.data, image.mime_type)
    url = image.url
    if not is_data_url(url):
        return url
    try:
        data, mime_type = decode_data_url(url)
    except ValueError as error:
        raise InvalidRequest(f"{field}.url: {error}") from None
    return File(data, image.mime_type or mime_type)


def read_item(
    asked: AskedItem, files: Sequence[File], options: pb.ItemOptions, recipe: Recipe, limits: MediaLimits
) -> ReadItem:
    """Reads an item's files. options: resolved. Takes 1 ms a MB: not for an event loop. Raises InvalidRequest."""
    headers = [
        _named(asked.image_field(i), lambda file=file: _header(asked, file, limits)) for i, file in enumerate(files)
    ]
    num_bytes = sum(len(file.data) for file in files)
    if num_bytes > limits.max_item_bytes:
        raise InvalidRequest(f"{asked.field} has {num_bytes} bytes: max_item_mib allows {limits.max_item_bytes}")
    first = headers[0]
    for i, header in enumerate(headers):
        if (header.width, header.height) != (first.width, first.height):
            raise InvalidRequest(
                f"{asked.image_field(i)} has {header.width} x {header.height} pixels, and the first frame "
                f"{first.width} x {first.height}: give frames of one size"
            )
    size = ItemSize(
        kind=asked.kind,
        width=first.width,
        height=first.height,
        num_frames=len(files),
        frames_per_second=frames_per_second(asked),
        min_pixels=options.min_pixels if options.HasField("min_pixels") else None,
        max_pixels=options.max_pixels if options.HasField("max_pixels") else None,
    )
    layout = _named(asked.field, lambda: recipe.layout(size))
    if options != limits.defaults:
        _check_options(asked.field, size, layout, recipe, limits)
    packed = PackedItem(asked.kind, [file.data for file in files], size.frames_per_second, options)
    return ReadItem(packed, layout)


def _check_options(field: str, size: ItemSize, layout: Layout, recipe: Recipe, limits: MediaLimits) -> None:
    """Refuses options by which an item gets more embeddings than the largest one without them, for which memory is
    reserved. Raises InvalidRequest."""
    limit, defaults = limits.per_prompt[size.kind], limits.defaults
    largest = replace(
        size,
        width=limit.width or _LARGE_SIDE,
        height=limit.height or _LARGE_SIDE,
        min_pixels=defaults.min_pixels if defaults.HasField("min_pixels") else None,
        max_pixels=defaults.max_pixels if defaults.HasField("max_pixels") else None,
    )
    most = recipe.layout(largest).num_embeddings
    if layout.num_embeddings > most:
        raise InvalidRequest(
            f"item_options give {field} {layout.num_embeddings} embeddings: mm_processor_kwargs and "
            f"limit_mm_per_prompt allow {most}; use lower min_pixels and max_pixels"
        )


def _header(asked: AskedItem, file: File, limits: MediaLimits) -> ImageHeader:
    """Raises ValueError."""
    header = read_header(file.data, file.mime_type, max_pixels=limits.max_item_pixels)
    limits.check_header(asked.kind, header)
    return header


def _named(field: str, read: Callable[[], _Result]) -> _Result:
    """Names the field in a ValueError."""
    try:
        return read()
    except ValueError as error:
        raise InvalidRequest(f"{field}: {error}") from None
