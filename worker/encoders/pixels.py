"""Decodes images and resizes them, with the same results as transformers' processors on Pillow.

Legend: F frames, C colours.
"""

import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from protos.inference_pb2 import ITEM_KIND_IMAGE, ITEM_KIND_VIDEO, ItemData, ItemKind
from runtime.media.headers import read_header
from worker.encoders.encoder import ItemError

# How an image is turned, by the orientation that EXIF data has.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# As configs.groups.media bounds max_item_pixels; routers have checked that option.
_MOST_PIXELS = 1 << 28


@dataclass(frozen=True, slots=True, kw_only=True)
class Pixels:
    """A Prepared: an item's frames after they were resized. They become numbers of the tower's dtype piece by piece, on
    the tower's device: as float32 patches they would take 4 to 8 times the memory."""

    # uint8, [F, height, width, 3].
    frames: torch.Tensor
    num_embeddings: int
    kind: ItemKind = ITEM_KIND_IMAGE
    # Embeddings along time, height and width, if they form a grid.
    grid: tuple[int, int, int] = (0, 0, 0)

    @property
    def num_bytes(self) -> int:
        return self.frames.nbytes


def decoded(data: ItemData) -> list[Image.Image]:
    """Returns an image, or the frames of a video, turned as EXIF data asks for, as RGB. Raises ItemError."""
    if data.kind not in (ITEM_KIND_IMAGE, ITEM_KIND_VIDEO):
        raise ItemError(f"kind={data.kind} is neither an image nor a video")
    if data.kind == ITEM_KIND_IMAGE and len(data.files) != 1:
        raise ItemError(f"an image has {len(data.files)} files: it must have one")
    if not data.files:
        raise ItemError("a video has no frames: it must have at least one")
    frames = [_decoded(file) for file in data.files]
    for number, frame in enumerate(frames):
        if frame.size != frames[0].size:
            raise ItemError(
                f"frame {number} of a video has {frame.width} x {frame.height} pixels, and the first one "
                f"{frames[0].width} x {frames[0].height}: all must have the same size"
            )
    return frames


def _decoded(file: bytes) -> Image.Image:
    try:
        header = read_header(file, max_pixels=_MOST_PIXELS)
    except ValueError as error:
        raise ItemError(f"an image can't be decoded: {error}") from None
    try:
        # Reads the header only; raises DecompressionBombError for more pixels than twice Image.MAX_IMAGE_PIXELS.
        image = Image.open(io.BytesIO(file), formats=(header.format,))
        # Not exif_transpose: routers have counted with the header's orientation, and Pillow may find another one.
        turn = _TURNS.get(header.orientation)
        return _as_rgb(image if turn is None else image.transpose(turn))
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - Pillow's decoders raise whatever damaged files lead them to
        what = " ".join(str(error).split()) or type(error).__name__
        raise ItemError(f"an image can't be decoded: {what}; send a whole file") from None


def _as_rgb(image: Image.Image) -> Image.Image:
    """Puts what is transparent on white, as transformers' convert_to_rgb does."""
    if image.mode.startswith("I;16"):
        # Pillow would clip 16-bit grey at 255. For colours, it takes the upper byte itself.
        image = Image.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image).convert("RGB")
    return image.convert("RGB")


def resized(image: Image.Image, size: tuple[int, int], resample: int) -> Image.Image:
    """size: height and width. resample: as preprocessor_config.json has it, Pillow's number of a filter."""
    height, width = size
    return image.resize((width, height), resample=Image.Resampling(resample))


def stacked(images: Iterable[Image.Image]) -> torch.Tensor:
    """Returns uint8 [F, height, width, 3]."""
    return torch.from_numpy(np.stack([np.asarray(image) for image in images]))


def scale_of_values(
    settings: Mapping[str, Any], mean: tuple[float, ...], std: tuple[float, ...], device: torch.device
) -> torch.Tensor:
    """Returns float32 [3, 256]: what each value of each colour becomes.

    settings: of the image processor. mean, std: of models whose files don't say. Rounded as transformers does: once
    when values are scaled, in float64, once when the mean is subtracted, and once when they are divided. Raises
    ValueError.
    """
    mean, std = (tuple(settings.get(name) or default) for name, default in (("image_mean", mean), ("image_std", std)))
    if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
        raise ValueError(f"image_mean={list(mean)}, image_std={list(std)}: three numbers each are needed, std above 0")
    values = (np.arange(256, dtype=np.float64) * float(settings.get("rescale_factor", 1 / 255))).astype(np.float32)
    table = (values - np.array(mean, np.float32)[:, None]) / np.array(std, np.float32)[:, None]
    return torch.from_numpy(table).to(device)


def valued(pixels: torch.Tensor, table_C: torch.Tensor) -> torch.Tensor:
    """Returns float32 of the same shape. pixels: uint8, colours last. table_C: from `scale_of_values`."""
    colours = torch.arange(3, device=pixels.device) * 256
    return table_C.flatten()[pixels.long() + colours]


def resample_of(settings: Mapping[str, Any], default: Image.Resampling) -> int:
    """Returns the number of a filter. Raises ValueError."""
    number = settings.get("resample", int(default))
    if number not in list(Image.Resampling):
        raise ValueError(f"resample={number!r} of preprocessor_config.json is no filter of Pillow's, 0 to 5")
    return int(number)
