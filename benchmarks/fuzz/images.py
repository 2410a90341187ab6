"""Makes hostile files of images: whole, cut and changed, bombs, and splices of two files in which two readers may find
two sizes."""

import io
import struct
import zlib
from random import Random
from typing import Any

from PIL import Image

from benchmarks.fuzz.mutation import change_bytes
from runtime.media.headers import FORMATS

_MODES = {
    "PNG": ("RGB", "RGBA", "P", "L", "LA", "1", "I;16"),
    "JPEG": ("RGB", "CMYK", "L"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("P", "L"),
    "BMP": ("RGB", "L", "1"),
}
_SIZES = ((1, 1), (30, 20), (7, 300), (64, 64))
# Where a file's head ends: of what tells a size, and of what comes before it.
_HEADS = {"PNG": (8, 33), "JPEG": (2, 20), "GIF": (13, 13), "WEBP": (12, 12), "BMP": (14, 54)}


def hostile_image(random: Random) -> bytes:
    form = random.choice(list(FORMATS))
    data = written(form, random)
    how = random.random()
    if how < 0.2:
        return _resized_header(form, data, random)
    if how < 0.5:
        data = spliced(form, data, written(form, random), random)
    return change_bytes(data, random) if 0.35 < how < 0.85 else data


def written(form: str, random: Random, size: tuple[int, int] | None = None) -> bytes:
    """Returns a whole file, of any mode, with EXIF data and as an animation if its format has them."""
    file, options = io.BytesIO(), dict[str, Any]()
    image = Image.new(random.choice(_MODES[form]), size or random.choice(_SIZES))
    if form in ("PNG", "JPEG", "WEBP") and random.random() < 0.5:
        exif = Image.Exif()
        exif[0x0112] = random.randrange(10)
        options["exif"] = exif
    if form in ("GIF", "PNG", "WEBP") and random.random() < 0.2:
        options.update(save_all=True, append_images=[image, image])
    if form == "JPEG" and random.random() < 0.3:
        options["progressive"] = True
    if form == "WEBP" and random.random() < 0.5:
        options["lossless"] = True
    image.save(file, form, **options)
    return file.getvalue()


def spliced(form: str, first: bytes, second: bytes, random: Random) -> bytes:
    """Returns a file of a format with parts of two, such as two headers."""
    before, after = _HEADS[form]
    kinds = [
        first[:after] + second[before:],
        first[:before] + second[before:after] + first[before:],
        second[:after] + first[before:],
        first + second,
    ]
    if form == "PNG":
        size = chunk(random.choice((b"tEXt", b"abcd", b"PLTE", b"sBIT")), first[16:24] + b"\0\0\0\0\0")
        kinds += [first[:8] + size + second[8:], first[:33] + second[8:33] + first[33:], first[:-12] + second[8:]]
    elif form == "JPEG":
        kinds += [first[:2] + segment(0xE0, second[2:60]) + first[2:], first[:2] + _frame_header(second) + first[2:]]
    elif form == "GIF":
        kinds.append(swallowed_frame(first, second))
    elif form == "WEBP":
        body = first[12:] + second[12:]
        kinds.append(b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body)
    return random.choice(kinds)


def swallowed_frame(first: bytes, second: bytes) -> bytes:
    """Returns a GIF with the head of `first`. Pillow takes the frame that follows for the rest of an extension, whose
    first block is empty, and shows that of `second`; other readers show the first one."""
    head, frame = _gif_parts(first)
    _, shown = _gif_parts(second)
    return head + b"!\xf9\0" + bytes([min(len(frame), 255)]) + frame[:255] + b"\0" + shown + b";"


def _gif_parts(data: bytes) -> tuple[bytes, bytes]:
    """Returns the head, and the first frame to the end of the file."""
    head = 13 + (3 << ((data[10] & 7) + 1) if data[10] & 0x80 else 0)
    return data[:head], data[data.index(b",", head) : -1]


def _frame_header(data: bytes) -> bytes:
    """Returns the segment of a JPEG that tells its size."""
    start = max(data.find(b"\xff\xc0"), data.find(b"\xff\xc2"))
    return data[start : start + 2 + int.from_bytes(data[start + 2 : start + 4], "big")]


def chunk(kind: bytes, body: bytes = b"") -> bytes:
    """Returns a chunk of a PNG."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def segment(marker: int, body: bytes) -> bytes:
    """Returns a segment of a JPEG."""
    return bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body


def _resized_header(form: str, data: bytes, random: Random) -> bytes:
    """Changes the size that a file tells, mostly to that of a bomb, without its pixels."""
    width, height = (random.choice((0, 1, 2**15, 65_535, 2**20)) for _ in range(2))
    changed = bytearray(data)
    if form == "PNG":
        changed[16:24] = struct.pack(">II", width, height)
        changed[29:33] = struct.pack(">I", zlib.crc32(changed[12:29]))
    elif form == "GIF":
        changed[6:10] = struct.pack("<HH", min(width, 65_535), min(height, 65_535))
    elif form == "BMP":
        changed[18:26] = struct.pack("<ii", width, random.choice((-1, 1)) * height)
    elif form == "JPEG":
        place = max(changed.find(b"\xff\xc0"), changed.find(b"\xff\xc2")) + 5
        changed[place : place + 4] = struct.pack(">HH", min(height, 65_535), min(width, 65_535))
    else:
        changed[24:30] = random.randbytes(6)
    return bytes(changed)
