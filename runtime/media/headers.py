"""What the header of an image's file says: its format, and its size after the rotation that its EXIF data asks for.

Nothing is decompressed but texts of at most a MB beside the pixels, so that a small file can't take much time or
memory. Files from anyone are read here: all that is wrong with one is a ValueError.
"""

import io
import struct
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from PIL import BmpImagePlugin, GifImagePlugin, Image, JpegImagePlugin, PngImagePlugin

from runtime.media.reduced import PNG_SIGNATURE, reduced_gif, reduced_jpeg, reduced_png, webp_chunks

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
    SyntaxError, OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, struct.error, zlib.error,
    Warning, Image.DecompressionBombError,
)  # fmt: skip
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
    told = mime_type.partition(";")[0].strip().lower()
    if told and told not in FORMATS[name]:
        raise ValueError(f"mime_type={mime_type[:80]!r}, but the data is {name}: say {FORMATS[name][0]}, or nothing")
    try:
        width, height, orientation = _READERS[name](data)
    except _DAMAGED as error:
        raise ValueError(f"the header of the {name} file is damaged ({_words(error)}): send a whole file") from None
    if min(width, height) < 1:
        raise ValueError(f"the {name} file has {width} x {height} pixels: send at least 1 x 1")
    if max_pixels is not None and width * height > max_pixels:
        raise ValueError(
            f"the {name} file has {width} x {height} = {width * height} pixels: max_item_pixels={max_pixels} allows "
            "no more than that; send a smaller image"
        )
    if orientation >= 5:
        width, height = height, width
    return ImageHeader(width=width, height=height, format=name, mime_type=FORMATS[name][0], orientation=orientation)


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


def _read_png(data: bytes) -> tuple[int, int, int]:
    width, height = struct.unpack(">II", data[16:24])
    with PngImagePlugin.PngImageFile(io.BytesIO(reduced_png(data))) as image:
        return width, height, _orientation(image.info)  # type: ignore[arg-type]


def _read_by_pillow(
    opened: Callable[[io.BytesIO], Image.Image], reduced: Callable[[bytes], bytes] = bytes
) -> Callable[[bytes], tuple[int, int, int]]:
    def read(data: bytes) -> tuple[int, int, int]:
        with opened(io.BytesIO(reduced(data))) as image:
            return *image.size, _orientation(image.info)  # type: ignore[arg-type]

    return read


def _read_webp(data: bytes) -> tuple[int, int, int]:
    """Pillow's reader allocates the pixels at once, so the chunks are read here."""
    size: tuple[int, int] | None = None
    info: dict[str, object] = {}
    for kind, body in webp_chunks(data):
        if size is None:
            size = _webp_size(kind, body[:16])
        elif kind in (b"EXIF", b"XMP ") and body:
            info["exif" if kind == b"EXIF" else "xmp"] = body
    if size is None:
        raise ValueError("it has no image")
    return *size, _orientation(info)


def _webp_size(kind: bytes, body: bytes) -> tuple[int, int]:
    """Returns width and height from the first chunk. Raises ValueError."""
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


_READERS: dict[str, Callable[[bytes], tuple[int, int, int]]] = {
    "PNG": _read_png,
    "JPEG": _read_by_pillow(JpegImagePlugin.JpegImageFile, reduced_jpeg),
    "WEBP": _read_webp,
    "GIF": _read_by_pillow(GifImagePlugin.GifImageFile, reduced_gif),
    "BMP": _read_by_pillow(BmpImagePlugin.BmpImageFile),
}
