"""Reads the header of an image's file: its format, and its size after the rotation that its EXIF data asks for.

Routers read headers, workers decode, and both by the same readers of Pillow: sizes that are counted are those that are
decoded. Nothing is decompressed but texts of at most a MB beside the pixels, so that a small file can't take much time
or memory. Files from anyone are read here: all that is wrong with one is a ValueError.
"""

import io
import struct
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from PIL import BmpImagePlugin, GifImagePlugin, Image, ImageFile, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

from runtime.media.reduced import (
    PNG_SIGNATURE,
    MeteredFile,
    check_webp,
    jpeg_pixels,
    metadata,
    png_pixels,
    reduced_jpeg,
    reduced_png,
)

# Pillow warns of what is wrong with a file in as many words as there are files, and Python remembers each.
warnings.filterwarnings("ignore", category=Warning, module=r"PIL\.")

# Pillow's names of the formats that are read, and their mime types, the usual one first.
FORMATS = {
    "PNG": ("image/png", "image/x-png"),
    "JPEG": ("image/jpeg", "image/jpg", "image/pjpeg"),
    "WEBP": ("image/webp",),
    "GIF": ("image/gif",),
    "BMP": ("image/bmp", "image/x-ms-bmp", "image/x-bmp"),
}
_KNOWN = "use PNG, JPEG, WebP, GIF or BMP"
# What reading a damaged header raises in Pillow, beside ValueError; its warnings may be errors, too.
_DAMAGED = (
    SyntaxError,
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    struct.error,
    zlib.error,
    Warning,
    Image.DecompressionBombError,
)
_ORIENTATION = 0x0112


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageHeader:
    """Pixels, after the rotation, and one of FORMATS."""

    width: int
    height: int
    format: str
    mime_type: str
    # As in EXIF data: 1 to 8; 1: the image is as it is in the file.
    orientation: int


def read_header(data: bytes, mime_type: str = "", *, max_pixels: int | None = None) -> ImageHeader:
    """Reads the header of an image's file; of an animated one, that of its first frame. Takes a few ms at most.

    mime_type: the one that came with the file; empty: as the data says. max_pixels: of the image in its file. Raises
    ValueError, which says what would work.
    """
    name = _format_of(data)
    type_given = mime_type.partition(";")[0].strip().lower()
    if type_given and type_given not in FORMATS[name]:
        raise ValueError(f"mime_type={mime_type[:80]!r}, but the data is {name}: say {FORMATS[name][0]}, or nothing")
    try:
        if name == "WEBP":
            # Pillow's reader allocates the pixels at once.
            _check_pixels(name, *_webp_size(data), max_pixels)
        with _READERS[name].of_header(data) as image:
            width, height = image.size
            _check_pixels(name, width, height, max_pixels)
            orientation = _orientation(metadata(image.info))
    except _RefusedError:
        raise
    except _DAMAGED as error:
        raise ValueError(f"the header of the {name} file is damaged ({_words(error)}): send a whole file") from None
    if orientation >= 5:
        width, height = height, width
    return ImageHeader(width=width, height=height, format=name, mime_type=FORMATS[name][0], orientation=orientation)


def open_image(data: bytes, header: ImageHeader) -> ImageFile.ImageFile:
    """Opens a file for its pixels, of which none is decoded yet. header: of that file.

    Raises ValueError if Pillow finds another size than the header has: memory is allocated by Pillow's. Raises what
    Pillow raises for damaged files.
    """
    image = _READERS[header.format].of_pixels(data)
    if isinstance(image.fp, MeteredFile):
        image.fp.lift()
    expected = (header.height, header.width) if header.orientation >= 5 else (header.width, header.height)
    if image.size != expected:
        width, height = image.size
        raise ValueError(
            f"the {header.format} file has {width} x {height} pixels, and its header {expected[0]} x {expected[1]}: "
            "send a file with one size"
        )
    return image


class _RefusedError(ValueError):
    """The file is whole; the message is for the client."""


def _check_pixels(name: str, width: int, height: int, most: int | None) -> None:
    """Raises _RefusedError."""
    if min(width, height) < 1:
        raise _RefusedError(f"the {name} file has {width} x {height} pixels: send at least 1 x 1")
    if most is not None and width * height > most:
        raise _RefusedError(
            f"the {name} file has {width} x {height} = {width * height} pixels: max_item_pixels={most} allows no more "
            "than that; send a smaller image"
        )


def _format_of(data: bytes) -> str:
    """Raises ValueError."""
    if not data:
        raise ValueError(f"there is no data: {_KNOWN}")
    if data.startswith(PNG_SIGNATURE):
        return "PNG"
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    if data.startswith(b"BM"):
        return "BMP"
    begin = data[:64].lstrip().lower()
    kind = "SVG or XML" if begin.startswith((b"<svg", b"<?xml", b"<!doctype svg")) else "of an unknown format"
    raise ValueError(f"the data is {kind}: {_KNOWN}")


def _orientation(info: dict[str, object]) -> int:
    """Returns the orientation by Pillow's own rules, which exif_transpose follows: EXIF data, then XMP. 1: as it is."""
    image = Image.Image()
    image.info = info  # type: ignore[assignment]
    found = image.getexif().get(_ORIENTATION, 1)
    return found if isinstance(found, int) and 1 <= found <= 8 else 1


@dataclass(frozen=True, slots=True)
class _Reader:
    """Opens a file by Pillow, for its header and for its pixels."""

    of_header: Callable[[bytes], ImageFile.ImageFile]
    of_pixels: Callable[[bytes], ImageFile.ImageFile]

    @classmethod
    def whole(cls, opened: Callable[[io.BytesIO], ImageFile.ImageFile]) -> "_Reader":
        """A reader of whole files."""

        def read(data: bytes) -> ImageFile.ImageFile:
            return opened(MeteredFile(data))

        return cls(read, read)

    @classmethod
    def reduced(
        cls,
        opened: Callable[[io.BytesIO], ImageFile.ImageFile],
        header: Callable[[bytes], bytes],
        pixels: Callable[[bytes], bytes],
    ) -> "_Reader":
        """A reader of two copies of a file."""
        return cls(lambda data: opened(io.BytesIO(header(data))), lambda data: opened(io.BytesIO(pixels(data))))


def _webp(file: io.BytesIO) -> ImageFile.ImageFile:
    check_webp(file.getvalue())
    return WebPImagePlugin.WebPImageFile(file)


def _bmp(file: io.BytesIO) -> ImageFile.ImageFile:
    image = BmpImagePlugin.BmpImageFile(file)
    if any(tile.codec_name == "bmp_rle" for tile in image.tile):
        # 36 million pixels of a file of 24 KB take Pillow's decoder, which is in Python, seconds.
        raise _RefusedError("the BMP file is compressed by run lengths: send it uncompressed, or as PNG")
    return image


def _webp_size(data: bytes) -> tuple[int, int]:
    """Returns width and height from the first chunk. Raises ValueError."""
    kind, body = data[12:16], data[20:30]
    if kind == b"VP8X" and len(body) >= 10:
        return 1 + int.from_bytes(body[4:7], "little"), 1 + int.from_bytes(body[7:10], "little")
    if kind == b"VP8L" and len(body) >= 5 and body[0] == 0x2F:
        bits = int.from_bytes(body[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 " and len(body) >= 10 and body[3:6] == b"\x9d\x01\x2a":
        return int.from_bytes(body[6:8], "little") & 0x3FFF, int.from_bytes(body[8:10], "little") & 0x3FFF
    raise ValueError("its first chunk has no size")


def _words(error: BaseException) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__


_READERS: dict[str, _Reader] = {
    "PNG": _Reader.reduced(PngImagePlugin.PngImageFile, reduced_png, png_pixels),
    "JPEG": _Reader.reduced(JpegImagePlugin.JpegImageFile, reduced_jpeg, jpeg_pixels),
    "WEBP": _Reader.whole(_webp),
    "GIF": _Reader.whole(GifImagePlugin.GifImageFile),
    "BMP": _Reader.whole(_bmp),
}
