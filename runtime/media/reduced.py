"""Copies of images' files with what Pillow needs to read their headers, and without the rest.

Pillow reads all that stands before an image's pixels one piece after another, in Python: 15 MB of short pieces of EXIF
data, which it joins each time, would take minutes, in routers and in workers. So files with more pieces than any camera
or program writes are refused here. All functions raise ValueError.
"""

import re
import struct
import zlib
from collections.abc import Iterator

from PIL import JpegImagePlugin

# Bytes of metadata that are read; what is beyond has no effect.
_MOST_METADATA = 2**20
# Chunks, or pieces of them, and bytes between them.
_MOST_PIECES = 65_536
# Segments before a JPEG's pixels: a color profile has up to 255, a map of depths some hundred. Pillow joins those with
# EXIF data, which are one or two.
_MOST_SEGMENTS, _MOST_EXIF = 4096, 64
# Times that a JPEG's decoder goes over all pixels: progressive files have about ten scans. A scan of 60 bytes takes it
# 50 ms for 36 million pixels.
_MOST_SCANS = 50

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_METADATA = frozenset({b"IHDR", b"PLTE", b"eXIf", b"iTXt", b"zTXt", b"tEXt"})

_SOS, _APP1 = 0xDA, 0xE1
_MARKERS = {marker & 0xFF: handler for marker, (_, _, handler) in JpegImagePlugin.MARKER.items()}
_SIZES = frozenset(marker for marker, handler in _MARKERS.items() if handler is JpegImagePlugin.SOF)
# A marker that ends a scan: within pixels, FF is followed by 0, or is one of eight markers that restart the decoder.
_END_OF_SCAN = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
# A search holds the interpreter's lock: 2 ms for so many bytes.
_SEARCHED_BYTES = 2**18


def reduced_png(data: bytes) -> bytes:
    """Pillow looks for EXIF data behind the pixels, too, and decodes them to get there."""
    kept = [PNG_SIGNATURE]
    room = _MOST_METADATA
    for kind, start, end in _png_chunks(data):
        if kind in _PNG_METADATA and end - start <= room:
            kept.append(data[start:end])
            room -= end - start
    return b"".join([*kept, _png_chunk(b"IDAT"), _png_chunk(b"IEND")])


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


def webp_chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields the type of each chunk and its beginning, at most _MOST_METADATA bytes: RFC 9649."""
    start, end = 12, min(len(data), 8 + int.from_bytes(data[4:8], "little"))
    for _ in range(_MOST_PIECES):
        kind, length = data[start : start + 4], int.from_bytes(data[start + 4 : start + 8], "little")
        body = start + 8
        if end < body:
            return
        yield kind, b"" if length > _MOST_METADATA else data[body : body + length]
        start = body + length + length % 2
    raise ValueError(f"it has more than {_MOST_PIECES} chunks")


def reduced_jpeg(data: bytes) -> bytes:
    """Keeps the segments that tell sizes, EXIF data and XMP."""
    kept, room, num_exif, num_between = [data[:2]], _MOST_METADATA, 0, 0
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
        segment = data[end - 1 : position]
        if marker == _APP1:
            num_exif += segment[4:10] == b"Exif\0\0"
            if num_exif > _MOST_EXIF:
                raise ValueError(f"it has more than {_MOST_EXIF} segments of EXIF data")
            if len(segment) <= room:
                kept.append(segment)
                room -= len(segment)
        elif marker in _SIZES:
            kept.append(segment)
        elif marker == _SOS:
            kept.append(segment)
            _check_scans(data, position)
            break
    else:
        raise ValueError(f"it has more than {_MOST_SEGMENTS} segments before its pixels")
    return b"".join(kept)


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


def reduced_gif(data: bytes) -> bytes:
    """Keeps the first frame, without its pixels: its size may be more than the one that the file's head tells."""
    head = 13
    if data[10:11] and data[10] & 0x80:
        head += 3 << ((data[10] & 7) + 1)
    position = head
    for _ in range(_MOST_PIECES):
        kind = data[position : position + 1]
        if kind in (b"", b";"):
            break
        if kind == b",":
            end = position + 10
            if data[end - 1 : end] and data[end - 1] & 0x80:
                end += 3 << ((data[end - 1] & 7) + 1)
            return data[:head] + data[position : end + 1] + b"\0;"
        position = _behind_extension(data, position) if kind == b"!" else position + 1
    else:
        raise ValueError(f"it has more than {_MOST_PIECES} blocks before its first frame")
    return data[:head] + b";"


def _behind_extension(data: bytes, position: int) -> int:
    """Returns where an extension ends that begins at a position."""
    position += 2
    for _ in range(_MOST_PIECES):
        length = data[position] if position < len(data) else 0
        position += 1 + length
        if not length:
            return position
    raise ValueError(f"it has an extension of more than {_MOST_PIECES} blocks")
