"""Decodes images and resizes them, with the same results as transformers' processors on Pillow.

Sizes come from headers, as in routers; a file of which Pillow makes another size is refused before it is decoded.

Legend: F frames, C colours.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image

from protos.inference_pb2 import ITEM_KIND_IMAGE, ITEM_KIND_VIDEO, ItemData
from runtime.media.headers import ImageHeader, open_image, read_header
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
# The side of the squares in which transparent pixels are put on white.
_SIDE, _WHITE = 1024, (255, 255, 255, 255)


class Frames:
    """An item's files, whose headers were read: an image, or the frames of a video.

    They are decoded one at a time, when they are asked for: each takes up to worker.encoders.sizes.MOST_BYTES_A_PIXEL
    until it is resized.
    """

    def __init__(self, data: ItemData) -> None:
        """Raises ItemError."""
        if data.kind not in (ITEM_KIND_IMAGE, ITEM_KIND_VIDEO):
            raise ItemError(f"kind={data.kind} is neither an image nor a video")
        if data.kind == ITEM_KIND_IMAGE and len(data.files) != 1:
            raise ItemError(f"an image has {len(data.files)} files: it must have one")
        if not data.files:
            raise ItemError("a video has no frames: it must have at least one")
        self._files, self._headers = data.files, [_header(file) for file in data.files]
        # In pixels, turned as EXIF data asks for.
        self.width, self.height = self._headers[0].width, self._headers[0].height
        for number, header in enumerate(self._headers):
            if (header.width, header.height) != (self.width, self.height):
                raise ItemError(
                    f"frame {number} of a video has {header.width} x {header.height} pixels, and the first one "
                    f"{self.width} x {self.height}: all must have the same size"
                )

    def __len__(self) -> int:
        return len(self._headers)

    def resized(self, size: tuple[int, int], resample: int) -> torch.Tensor:
        """Decodes the frames one after the other. Returns uint8 [F, height, width, 3]. Raises ItemError."""
        frames = torch.empty(len(self), *size, 3, dtype=torch.uint8)
        for number in range(len(self)):
            frames[number] = array_of(resized(self.decoded(number), size, resample))
        return frames

    def decoded(self, number: int) -> Image.Image:
        """Returns a frame as RGB, turned as EXIF data asks for. Raises ItemError."""
        header = self._headers[number]
        try:
            image: Image.Image = open_image(self._files[number], header)
            image.load()
            # Not exif_transpose: routers have counted with the header's orientation, and Pillow may find another one.
            if (turn := _TURNS.get(header.orientation)) is not None:
                image = image.transpose(turn)
            return _as_rgb(image)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - Pillow's decoders raise whatever damaged files lead them to
            what = " ".join(str(error).split()) or type(error).__name__
            raise ItemError(f"an image can't be decoded: {what}; send a whole file") from None


def _header(file: bytes) -> ImageHeader:
    try:
        return read_header(file, max_pixels=_MOST_PIXELS)
    except ValueError as error:
        raise ItemError(f"an image can't be decoded: {error}") from None


def _as_rgb(image: Image.Image) -> Image.Image:
    """Puts what is transparent on white, as transformers' convert_to_rgb does."""
    if image.mode.startswith("I;16"):
        # Pillow would clip 16-bit grey at 255. For colours, it takes the upper byte itself.
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        return _on_white(image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _on_white(image: Image.Image) -> Image.Image:
    """Some pixels at a time: what is between would take three times the memory of the image."""
    rgb = Image.new("RGB", image.size)
    for top in range(0, image.height, _SIDE):
        for left in range(0, image.width, _SIDE):
            box = left, top, min(left + _SIDE, image.width), min(top + _SIDE, image.height)
            part = image.crop(box).convert("RGBA")
            rgb.paste(Image.alpha_composite(Image.new("RGBA", part.size, _WHITE), part).convert("RGB"), box)
    return rgb


def resized(image: Image.Image, size: tuple[int, int], resample: int) -> Image.Image:
    """size: height and width. resample: as preprocessor_config.json has it, Pillow's number of a filter."""
    height, width = size
    return image.resize((width, height), resample=Image.Resampling(resample))


def array_of(image: Image.Image) -> torch.Tensor:
    """Returns uint8 [height, width, 3]."""
    return torch.from_numpy(np.array(image))


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
