"""Copies of images' files with what Pillow needs to read their headers, or their pixels, and without the rest.

Pillow reads all that stands before an image's pixels one piece after another, in Python: 15 MB of short pieces of EXIF
data, which it joins each time, would take minutes, in routers and in workers. It also takes the last size of several,
where other readers take the first. So files with more pieces than any camera or program writes are refused here, and
so are those with more than one size. All functions raise ValueError.
"""

import io
import math
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from PIL import JpegImagePlugin

# Bytes of metadata that are read; what is beyond has no effect.
_MOST_METADATA = 2**20
# Chunks, or pieces of them, and bytes between them.
_MOST_PIECES = 65_536
# Segments before a JPEG's pixels: a color profile has up to 255, a map of depths some hundred. Pillow joins those with
# EXIF data, which are one or two. A PNG has one chunk of it, and one of XMP; each may unpack to a MB.
_MOST_SEGMENTS, _MOST_EXIF, _MOST_PNG_TEXTS = 4096, 64, 8
# Tags of EXIF data, of which Pillow makes an object each. Cameras write some dozen.
_MOST_TAGS = 4096
_EXIF = b"Exif\0\0"
# Times that a JPEG's decoder goes over all pixels: progressive files have about ten scans. A scan of 60 bytes takes it
# 50 ms for 36 million pixels.
_MOST_SCANS = 50

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_PIXELS = frozenset({b"IHDR", b"PLTE", b"tRNS", b"IDAT"})
# Pillow finds EXIF data and XMP in texts of these names.
_PNG_TEXTS = frozenset({b"iTXt", b"zTXt", b"tEXt"})
_PNG_PROFILE = b"Raw profile type exif"
_PNG_TEXT_NAMES = (_PNG_PROFILE + b"\0", b"XML:com.adobe.xmp\0")
_PNG_HEAD_BYTES = 33

_SOS, _APP1 = 0xDA, 0xE1
# Segments that a decoder of JPEG needs: tables, the interval of restarts, and what the colours are (JFIF, Adobe).
_JPEG_PIXELS = frozenset({0xC4, 0xCC, 0xDB, 0xDD, 0xE0, 0xEE})
_MARKERS = {marker & 0xFF: handler for marker, (_, _, handler) in JpegImagePlugin.MARKER.items()}
_SIZES = frozenset(marker for marker, handler in _MARKERS.items() if handler is JpegImagePlugin.SOF)
# A marker that ends a scan: within pixels, FF is followed by 0, or is one of eight markers that restart the decoder.
_END_OF_SCAN = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
# A search holds the interpreter's lock: 2 ms for so many bytes.
_SEARCHED_BYTES = 2**18


class MeteredFile(io.BytesIO):
    """A file whose reader may read a number of pieces before the pixels; `lift` ends that."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._num_left: float = _MOST_PIECES

    def read(self, size: int | None = -1, /) -> bytes:
        """See io.BytesIO."""
        self._num_left -= 1
        if self._num_left < 0:
            raise ValueError(f"it has more than {_MOST_PIECES} pieces before its pixels")
        return super().read(size)

    def lift(self) -> None:
        self._num_left = math.inf


def metadata(info: Mapping[Any, Any]) -> dict[Any, Any]:
    """Returns what Pillow has found in a file's header, without texts and data that are too long to be read. Raises
    ValueError for EXIF data of too many tags."""
    kept = {
        name: value
        for name, value in info.items()
        if not isinstance(value, bytes | str) or len(value) <= _MOST_METADATA
    }
    if isinstance(exif := kept.get("exif"), bytes):
        _check_exif(exif)
    # As hexadecimal digits. Image.getexif does not stop at tags.
    if len(kept.get(_PNG_PROFILE.decode(), "")) > 2 * 12 * _MOST_TAGS:
        raise ValueError(f"it has EXIF data of more than {_MOST_TAGS} tags")
    return kept


def _check_exif(data: bytes) -> None:
    """Raises ValueError for too many tags. data: a TIFF header and so on, which a prefix may stand before."""
    tiff = data.removeprefix(_EXIF)
    order: Literal["little", "big"] = "little" if tiff.startswith(b"II") else "big"
    directory = int.from_bytes(tiff[4:8], order)
    if int.from_bytes(tiff[directory : directory + 2], order) > _MOST_TAGS:
        raise ValueError(f"it has EXIF data of more than {_MOST_TAGS} tags")


def reduced_png(data: bytes) -> bytes:
    """Keeps what tells the size, EXIF data and XMP. Pillow looks for EXIF data behind the pixels, too, and decodes them
    to get there."""
    chunks = _checked_png_chunks(data)
    kept, room, num_texts = [data[:_PNG_HEAD_BYTES]], _MOST_METADATA, 0
    for kind, start, end in chunks:
        is_text = kind == b"eXIf" or (kind in _PNG_TEXTS and data.startswith(_PNG_TEXT_NAMES, start + 8))
        num_texts += is_text
        if num_texts > _MOST_PNG_TEXTS:
            raise ValueError(f"it has more than {_MOST_PNG_TEXTS} chunks of EXIF data and XMP")
        if (is_text or kind == b"PLTE") and end - start <= room:
            kept.append(data[start:end])
            room -= end - start
    return b"".join([*kept, _png_chunk(b"IDAT"), _png_chunk(b"IEND")])


def png_pixels(data: bytes) -> bytes:
    """Keeps the chunks that pixels follow from."""
    kept = [data[start:end] for kind, start, end in _checked_png_chunks(data) if kind in _PNG_PIXELS]
    return b"".join([PNG_SIGNATURE, *kept, _png_chunk(b"IEND")])


def _checked_png_chunks(data: bytes) -> list[tuple[bytes, int, int]]:
    """Returns the chunks of a file with one IHDR, the first chunk: Pillow takes the last one, others the first."""
    if data[8:16] != b"\0\0\0\rIHDR":
        raise ValueError("its first chunk is not an IHDR of 13 bytes")
    chunks = [*_png_chunks(data)]
    num_heads = sum(kind == b"IHDR" for kind, _, _ in chunks)
    if num_heads != 1:
        raise ValueError(f"it has {num_heads} whole IHDR chunks")
    return chunks


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yields the type of each whole chunk, and where it begins and ends."""
    start = len(PNG_SIGNATURE)
    for _ in range(_MOST_PIECES):
        if start + 12 > len(data):
            return
        end = start + 12 + int.from_bytes(data[start : start + 4], "big")
        if end > len(data):
            return
        kind = data[start + 4 : start + 8]
        yield kind, start, end
        if kind == b"IEND":
            return
        start = end
    raise ValueError(f"it has more than {_MOST_PIECES} chunks")


def _png_chunk(kind: bytes) -> bytes:
    """Returns an empty chunk."""
    return struct.pack(">I4sI", 0, kind, zlib.crc32(kind))


def check_webp(data: bytes) -> None:
    """Counts the chunks (RFC 9649): libwebp makes an object of each, in which time no other thread runs."""
    start, end = 12, min(len(data), 8 + int.from_bytes(data[4:8], "little"))
    for _ in range(_MOST_PIECES):
        length = int.from_bytes(data[start + 4 : start + 8], "little")
        start += 8 + length + length % 2
        if end < start + 8:
            return
    raise ValueError(f"it has more than {_MOST_PIECES} chunks")


def reduced_jpeg(data: bytes) -> bytes:
    """Keeps the segments that tell the size, EXIF data and XMP."""
    kept, room, exif = [data[:2]], _MOST_METADATA, list[bytes]()
    for marker, start, end in _jpeg_segments(data):
        segment = data[start:end]
        if marker == _APP1:
            if len(segment) <= room and segment.startswith(_EXIF, 4):
                exif.append(segment[10:])
            if len(exif) > _MOST_EXIF:
                raise ValueError(f"it has more than {_MOST_EXIF} segments of EXIF data")
            if len(segment) <= room:
                kept.append(segment)
                room -= len(segment)
        elif marker in _SIZES:
            kept.append(segment)
        elif marker == _SOS:
            kept.append(segment)
            _check_scans(data, end)
    _check_exif(b"".join(exif))
    return b"".join(kept)


def jpeg_pixels(data: bytes) -> bytes:
    """Keeps the segments that pixels follow from, and all that stands behind the header of the first scan."""
    kept = [data[:2]]
    for marker, start, end in _jpeg_segments(data):
        if marker in _SIZES or marker in _JPEG_PIXELS:
            kept.append(data[start:end])
        elif marker == _SOS:
            kept.append(data[start:])
    return b"".join(kept)


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yields the marker of each segment up to the first scan's header, and where it begins and ends."""
    num_sizes = num_between = 0
    position = 2
    for _ in range(_MOST_SEGMENTS):
        start = data.find(b"\xff", position)
        if start < 0:
            break
        end = start + 1
        while data[end : end + 1] == b"\xff" and end - start <= _MOST_PIECES:
            end += 1
        num_between += end - 1 - position
        if num_between > _MOST_PIECES:
            raise ValueError(f"it has more than {_MOST_PIECES} bytes between its segments")
        marker = data[end] if end < len(data) else -1
        if marker and marker not in _MARKERS:
            break
        if not marker or _MARKERS[marker] is None:
            # It has no length.
            position = end + 1
            continue
        length = int.from_bytes(data[end + 1 : end + 3], "big")
        position = max(end + 1 + length, end + 3)
        num_sizes += marker in _SIZES
        if num_sizes > 1:
            raise ValueError("it has more than one size")
        yield marker, end - 1, position
        if marker == _SOS:
            break
    else:
        raise ValueError(f"it has more than {_MOST_SEGMENTS} segments before its pixels")


def _check_scans(data: bytes, position: int) -> None:
    """position: behind the header of the first scan."""
    # Most files have fewer even if all their data is searched, with texts and whatever follows the image.
    if data.count(bytes([0xFF, _SOS]), position) < _MOST_SCANS:
        return
    for _ in range(_MOST_SCANS):
        while True:
            found = _end_of_scan(data, position)
            if found < 0 or data[found + 1] == 0xD9:
                return
            marker, length = data[found + 1], int.from_bytes(data[found + 2 : found + 4], "big")
            has_length = _MARKERS.get(marker) is not None
            position = max(found + 2 + length, found + 4) if has_length else found + 2
            if marker == _SOS:
                break
    raise ValueError(f"it has more than {_MOST_SCANS} scans")


def _end_of_scan(data: bytes, position: int) -> int:
    """Returns where the next marker begins, -1 if there is none."""
    while position < len(data):
        # A marker may begin with the last byte.
        if found := _END_OF_SCAN.search(data, position, position + _SEARCHED_BYTES + 1):
            return found.start()
        position += _SEARCHED_BYTES
    return -1
