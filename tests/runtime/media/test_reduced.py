"""Files whose headers are long: sizes and rotations as Pillow gives them, or refused before they take time."""

import io
import random
import struct
import zlib
from collections.abc import Callable

import pytest
from PIL import Image, ImageOps

from runtime.media.headers import read_header

MANY = 70_000


def _file(form: str, mode: str = "RGB", **options: object) -> bytes:
    written = io.BytesIO()
    Image.new(mode, (30, 20)).save(written, form, **options)
    return written.getvalue()


def _segment(marker: int, body: bytes) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body


def _chunk(kind: bytes, body: bytes = b"") -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def _in_jpeg(added: bytes) -> bytes:
    whole = _file("JPEG")
    return whole[:2] + added + whole[2:]


def _in_gif(added: bytes) -> bytes:
    """Behind the head and its palette."""
    whole = _file("GIF", "P")
    head = 13 + (3 << ((whole[10] & 7) + 1) if whole[10] & 0x80 else 0)
    return whole[:head] + added + whole[head:]


def _in_png(added: bytes) -> bytes:
    whole = _file("PNG")
    return whole[:33] + added + whole[33:]


def _in_webp(added: bytes) -> bytes:
    whole = _file("WEBP")
    return whole[:4] + struct.pack("<I", len(whole) + len(added) - 8) + whole[8:] + added


def _scans(count: int) -> bytes:
    """A progressive file that goes over its pixels more often."""
    whole = _file("JPEG", progressive=True)
    last = whole[whole.rindex(b"\xff\xda") : -2]
    return whole[:-2] + last * count + whole[-2:]


EXIF = Image.Exif()
EXIF[0x0112] = 6


@pytest.mark.parametrize(
    ("make", "words"),
    [
        # Pillow joins these one by one: 15 MB take minutes.
        (lambda: _in_jpeg(_segment(0xE1, b"Exif\0\0xx") * MANY), "more than 64 segments of EXIF data"),
        (lambda: _in_jpeg(_segment(0xE5, b"x") * MANY), "more than 4096 segments before its pixels"),
        (lambda: _in_jpeg(_segment(0xE5, b"x") + bytes(MANY)), "more than 65536 bytes between its segments"),
        (lambda: _in_jpeg(b"\xff" * MANY), "damaged"),
        (lambda: _scans(60), "more than 50 scans"),
        (lambda: _in_gif(b"\x21\xfe" + b"\x01x" * MANY + b"\0"), "more than 65536 pieces before its pixels"),
        (lambda: _in_gif(b"\x21\xfe\x01x\0" * MANY), "more than 65536 pieces before its pixels"),
        (lambda: _in_gif(bytes(MANY)), "more than 65536 pieces before its pixels"),
        (lambda: _in_png(_chunk(b"abcd") * MANY), "more than 65536 chunks"),
        (lambda: _in_webp(b"abcd\0\0\0\0" * MANY), "more than 65536 chunks"),
    ],
)
def test_too_many_pieces_are_refused(make: Callable[[], bytes], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_header(make())


def test_long_headers_of_cameras_and_programs() -> None:
    rng = random.Random(3)
    profile = b"".join(_segment(0xE2, b"ICC_PROFILE\0" + bytes((i, 255)) + bytes(900)) for i in range(1, 256))
    depths = b"".join(
        _segment(0xE1, b"http://ns.adobe.com/xmp/extension/\0" + rng.randbytes(60_000)) for _ in range(90)
    )
    exif = _segment(0xE1, EXIF.tobytes())
    # A video behind the image has whatever bytes.
    behind = b"\xff\xda\0\2" * 200
    for data in (
        _in_jpeg(profile + exif),
        _in_jpeg(depths + exif),
        _in_jpeg(b"\xff\xff\xff" + exif + b"\xff\0\0\0" + exif[:0] + _segment(0xFE, b"\xff\xda\xff\xc0")),
        _in_jpeg(exif) + behind,
        *(_file(form) + bytes(2_000_000) for form in ("PNG", "WEBP", "GIF", "BMP", "JPEG")),
        _scans(20) + behind,
        _in_gif(b"\x21\xfe" + (b"\xff" + bytes(255)) * 3000 + b"\0" + b"\x21\xf9\4\0\0\0\0\0"),
        _in_png(_chunk(b"abcd") * 5000 + _chunk(b"eXIf", EXIF.tobytes()[6:])),
    ):
        with Image.open(io.BytesIO(data)) as image:
            expected = ImageOps.exif_transpose(image).size
        header = read_header(data)
        assert (header.width, header.height) == expected


def test_a_first_frame_that_is_larger_than_its_file_says() -> None:
    data = bytearray(_in_gif(b""))
    frame = data.index(b",", 13)
    data[frame + 1 : frame + 9] = struct.pack("<HHHH", 5, 7, 30, 20)
    with Image.open(io.BytesIO(data)) as image:
        assert image.size == (35, 27)
    assert (read_header(bytes(data)).width, read_header(bytes(data)).height) == (35, 27)


def test_pixels_that_look_like_the_end_of_a_scan() -> None:
    """Whatever stands in segments between scans does not end the count."""
    whole = _file("JPEG", progressive=True)
    last = whole[whole.rindex(b"\xff\xda") : -2] + _segment(0xFE, b"\xff\xd9")
    with pytest.raises(ValueError, match="more than 50 scans"):
        read_header(whole[:-2] + last * 60 + whole[-2:])
