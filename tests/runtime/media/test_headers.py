"""Headers of images' files: sizes as Pillow gives them once pixels are decoded and rotated, else a ValueError."""

import io
import random
import struct
import zlib
from typing import Any

import pytest
from PIL import Image, ImageOps

from runtime.media.headers import FORMATS, read_header

EXIF = ("JPEG", "PNG", "WEBP")


def _file(form: str, width: int = 30, height: int = 20, mode: str = "RGB", **options: Any) -> bytes:
    written = io.BytesIO()
    Image.new(mode, (width, height)).save(written, form, **options)
    return written.getvalue()


def _decoded_size(data: bytes) -> tuple[int, int]:
    with Image.open(io.BytesIO(data)) as image:
        turned = ImageOps.exif_transpose(image)
        return turned.size


def _size(data: bytes) -> tuple[int, int]:
    header = read_header(data)
    return header.width, header.height


def _exif(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


@pytest.mark.parametrize("form", FORMATS)
def test_each_format(form: str) -> None:
    header = read_header(_file(form), FORMATS[form][0].upper() + "; charset=x")
    assert (header.width, header.height, header.format, header.mime_type) == (30, 20, form, FORMATS[form][0])
    assert read_header(_file(form, 1, 1)).width == 1


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", EXIF)
def test_sizes_are_those_after_the_rotation(form: str, orientation: int) -> None:
    data = _file(form, exif=_exif(orientation))
    assert _size(data) == _decoded_size(data) == ((20, 30) if orientation >= 5 else (30, 20))


def test_a_rotation_in_xmp() -> None:
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    for form in ("JPEG", "WEBP"):
        data = _file(form, xmp=xmp)
        assert _size(data) == _decoded_size(data) == (20, 30)


def test_exif_data_behind_the_pixels() -> None:
    """Pillow finds it only once it has decoded the pixels."""
    plain = _file("PNG")
    behind = plain[:-12] + _chunk(b"eXIf", _exif(6).tobytes().removeprefix(b"Exif\0\0")) + plain[-12:]
    assert _size(behind) == _decoded_size(behind) == (20, 30)


@pytest.mark.parametrize(
    ("form", "mode"),
    [
        ("JPEG", "CMYK"),
        ("JPEG", "L"),
        ("PNG", "I;16"),
        ("PNG", "P"),
        ("PNG", "LA"),
        ("PNG", "1"),
        ("GIF", "P"),
        ("BMP", "1"),
    ],
)
def test_other_modes(form: str, mode: str) -> None:
    assert _size(_file(form, mode=mode)) == (30, 20)


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP"])
def test_an_animation_is_its_first_frame(form: str) -> None:
    frames = [Image.new("RGB", (30, 20), color) for color in (0x10, 0x2000, 0x300000)]
    written = io.BytesIO()
    frames[0].save(written, form, save_all=True, append_images=frames[1:], duration=50)
    assert _size(written.getvalue()) == _decoded_size(written.getvalue()) == (30, 20)


@pytest.mark.parametrize("lossless", [False, True])
@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_each_kind_of_webp(lossless: bool, mode: str) -> None:
    data = _file("WEBP", 123, 45, mode=mode, lossless=lossless)
    assert _size(data) == _decoded_size(data) == (123, 45)


def test_bombs_are_refused_by_their_header() -> None:
    """64k x 64k pixels of a PNG are 8 MB, and 12 GiB once decoded."""
    header = struct.pack(">IIBBBBB", 65_535, 65_535, 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", bytes(100)) + _chunk(b"IEND", b"")
    gif = bytearray(_file("GIF"))
    gif[6:10] = struct.pack("<HH", 65_535, 65_535)
    bmp = bytearray(_file("BMP"))
    bmp[18:26] = struct.pack("<ii", 65_535, 65_535)
    jpeg = bytearray(_file("JPEG"))
    place = jpeg.index(b"\xff\xc0") + 5
    jpeg[place : place + 4] = struct.pack(">HH", 65_535, 65_535)
    webp = bytearray(_file("WEBP", lossless=True, exif=_exif(1)))
    webp[24:30] = b"\xff\xff\xff" * 2
    for data in map(bytes, (png, gif, bmp, jpeg, webp)):
        with pytest.raises(ValueError, match="pixels: max_item_pixels=40000000 allows"):
            read_header(data, max_pixels=40_000_000)


def test_texts_that_unpack_to_much_are_not_read() -> None:
    """A file of 25 KB whose metadata would be 24 MB."""
    plain, body = _file("PNG"), zlib.compress(bytes(8 * 2**20), 9)
    data = plain[:33] + _chunk(b"zTXt", b"Raw profile type exif\0\0" + body) * 3 + plain[33:]
    with pytest.raises(ValueError, match="the header of the PNG file is damaged"):
        read_header(data)
    # Texts that no orientation is in are left out.
    assert _size(plain[:33] + _chunk(b"zTXt", b"a\0\0" + body) * 3 + plain[33:]) == (30, 20)


@pytest.mark.parametrize(
    ("data", "mime_type", "words"),
    [
        (b"", "", "there is no data: use PNG, JPEG"),
        (b"<svg xmlns='x'></svg>", "", "the data is SVG or XML: use PNG"),
        (b"  <?xml version='1.0'?><svg/>", "image/svg+xml", "the data is SVG or XML"),
        (b"%PDF-1.7", "", "of an unknown format: use PNG"),
        (b"II*\0" + bytes(50), "image/tiff", "of an unknown format"),
        (_file("PNG"), "image/jpeg", "mime_type='image/jpeg', but the data is PNG: say image/png, or nothing"),
        (_file("PNG")[:20], "", "the header of the PNG file is damaged"),
        (_file("JPEG")[:50], "", "the header of the JPEG file is damaged"),
        (_file("GIF")[:8], "", "the header of the GIF file is damaged"),
        (_file("BMP")[:20], "", "the header of the BMP file is damaged"),
        (_file("WEBP")[:18], "", "the header of the WEBP file is damaged"),
        (
            b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", struct.pack(">IIBBBBB", 0, 5, 8, 2, 0, 0, 0)),
            "",
            "damaged|0 x 5 pixels",
        ),
    ],
)
def test_what_is_wrong_is_told(data: bytes, mime_type: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_header(data, mime_type)


def test_damaged_files_raise_nothing_else() -> None:
    draws = random.Random(5)
    whole = [_file(form, exif=_exif(6)) if form in EXIF else _file(form) for form in FORMATS]
    outcomes = {"read": 0, "refused": 0}
    for _ in range(2000):
        data = bytearray(draws.choice(whole))
        for _ in range(draws.randint(1, 6)):
            data[draws.randrange(len(data))] = draws.randrange(256)
        cut = bytes(data[: draws.randrange(4, len(data)) if draws.random() < 0.3 else len(data)])
        try:
            read_header(cut, max_pixels=10**8)
            outcomes["read"] += 1
        except ValueError:
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 100
