"""The size that routers count with is the one that workers decode, whatever a file has in two places."""

import io
import struct
import zlib
from collections import Counter
from collections.abc import Callable
from random import Random

import pytest
from PIL import Image

from benchmarks.fuzz.images import chunk, hostile_image, segment, swallowed_frame
from runtime.media.headers import ImageHeader, open_image, read_header

MOST_PIXELS = 1_000_000


def _file(form: str, width: int, height: int, mode: str = "RGB", **options: object) -> bytes:
    file = io.BytesIO()
    Image.new(mode, (width, height)).save(file, form, **options)
    return file.getvalue()


def _told(header: ImageHeader) -> tuple[int, int]:
    """Returns the size before the rotation."""
    turned = header.orientation >= 5
    return (header.height, header.width) if turned else (header.width, header.height)


SMALL, LARGE = _file("PNG", 64, 64), _file("PNG", 900, 900)
JPEG = _file("JPEG", 30, 20)
FRAME_HEADER = _file("JPEG", 900, 900)
FRAME_HEADER = FRAME_HEADER[FRAME_HEADER.index(b"\xff\xc0") :][:19]


def test_what_is_decoded_has_the_size_of_the_header() -> None:
    """Every format, spliced and changed: Pillow, if it reads the whole file, must find the size that was told."""
    random, became = Random(49), Counter[str]()
    for _ in range(4000):
        data = hostile_image(random)
        try:
            header = read_header(data, max_pixels=MOST_PIXELS)
        except ValueError:
            became["refused"] += 1
            continue
        try:
            image = open_image(data, header)
            assert image.size == _told(header)
            image.load()
        except AssertionError:
            raise
        except Exception:  # noqa: BLE001 - Pillow raises whatever damaged files lead it to
            became["not decoded"] += 1
            continue
        assert image.size == image.im.size == _told(header)
        became[header.format] += 1
        try:
            whole = Image.open(io.BytesIO(data), formats=(header.format,))
            whole.load()
        except Exception:  # noqa: BLE001 - see above
            became["only ours"] += 1
            continue
        # A JPEG may have more images, for other eyes; the first one counts.
        assert whole.size == _told(header), (header, data)
    for name in ("refused", "not decoded", "PNG", "JPEG", "WEBP", "GIF", "BMP"):
        assert became[name] > 50, became


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (SMALL[:8] + chunk(b"tEXt", struct.pack(">II", 64, 64) + b"\0x") + LARGE[8:], "first chunk is not an IHDR"),
        (SMALL[:33] + LARGE[8:], "2 whole IHDR chunks"),
        (SMALL[:33] + chunk(b"abcd") * 9 + LARGE[8:33] + SMALL[33:], "2 whole IHDR chunks"),
        (SMALL[:-12] + LARGE[8:33] + SMALL[-12:], "2 whole IHDR chunks"),
        (SMALL[:8] + chunk(b"IHDR", SMALL[16:29] + b"\0") + SMALL[33:], "first chunk is not an IHDR of 13 bytes"),
        (JPEG[:2] + FRAME_HEADER + JPEG[2:], "more than one size"),
        (JPEG[: JPEG.index(b"\xff\xda")] + FRAME_HEADER + JPEG[JPEG.index(b"\xff\xda") :], "more than one size"),
    ],
)
def test_files_with_two_sizes_are_refused(data: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_header(data)


def test_the_frame_that_pillow_shows_counts() -> None:
    """Pillow reads extensions of GIFs in its own way."""
    data = swallowed_frame(_file("GIF", 3, 3, "L"), _file("GIF", 300, 200, "L"))
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        assert image.size == (300, 200)
    assert _told(read_header(data)) == (300, 200)
    with pytest.raises(ValueError, match="300 x 200 = 60000 pixels: max_item_pixels=9 allows"):
        read_header(data, max_pixels=9)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_another_size_than_the_headers_is_refused_before_anything_is_decoded(form: str) -> None:
    """For whatever reason the two may differ one day."""
    data = _file(form, 300, 200)
    told = read_header(_file(form, 30, 20))
    with pytest.raises(ValueError, match=f"the {form} file has 300 x 200 pixels, and its header 30 x 20"):
        open_image(data, told)


def test_a_bmp_from_top_to_bottom() -> None:
    data = bytearray(_file("BMP", 30, 20))
    data[22:26] = struct.pack("<i", -20)
    header = read_header(bytes(data))
    assert open_image(bytes(data), header).size == (30, 20)
    # Pillow reads as upside down what has an FF at the end; all others are as high as unsigned numbers.
    data[22:26] = struct.pack("<i", -(2**31))
    with pytest.raises(ValueError, match="30 x 2147483648"):
        read_header(bytes(data), max_pixels=MOST_PIXELS)


def test_run_lengths_in_a_bmp_are_refused() -> None:
    """Pillow decodes them in Python: a line that ends at once takes it as long as one with all its pixels."""
    data = bytearray(_file("BMP", 30, 20, "P"))
    data[30:34] = struct.pack("<I", 1)
    with pytest.raises(ValueError, match="the BMP file is compressed by run lengths: send it uncompressed"):
        read_header(bytes(data))


@pytest.mark.parametrize(
    ("make", "read"),
    [
        # Pillow would unpack each profile to a MB, and each text.
        (lambda: SMALL[:33] + chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(2**20))) * 300 + SMALL[33:], "icc_profile"),
        (lambda: SMALL[:33] + chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**20))) * 60 + SMALL[33:], "a"),
        (lambda: SMALL[:33] + chunk(b"acTL", struct.pack(">II", 2, 0)) + SMALL[33:], "loop"),
        (lambda: JPEG[:2] + segment(0xED, b"Photoshop 3.0\0" + b"8BIM\0\1\0\0\0\0\0\0" * 5000) + JPEG[2:], "photoshop"),
        (lambda: JPEG[:2] + segment(0xE1, b"Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0") + JPEG[2:], "exif"),
    ],
)
def test_pixels_are_read_without_what_stands_beside_them(make: Callable[[], bytes], read: str) -> None:
    data = make()
    image = open_image(data, read_header(data))
    assert read not in image.info
    image.load()
    with Image.open(io.BytesIO(data)) as whole:
        assert read in whole.info
        assert whole.tobytes() == image.tobytes()


def test_metadata_of_many_tags_is_refused() -> None:
    tags = b"".join(struct.pack("<HHII", number, 4, 1, 7) for number in range(5000))
    exif = b"II*\0\x08\0\0\0" + struct.pack("<H", 5000) + tags + bytes(4)
    jpeg = b"".join(segment(0xE1, b"Exif\0\0" + exif[start : start + 30_000]) for start in range(0, len(exif), 30_000))
    webp = _file("WEBP", 30, 20, exif=b"Exif\0\0" + exif)
    profile = b"Raw profile type exif\0\0" + zlib.compress(b"\nexif\n    60000\n" + exif.hex().encode())
    for data in (
        SMALL[:33] + chunk(b"eXIf", exif) + SMALL[33:],
        SMALL[:33] + chunk(b"zTXt", profile) + SMALL[33:],
        JPEG[:2] + jpeg + JPEG[2:],
        webp,
    ):
        with pytest.raises(ValueError, match="EXIF data of more than 4096 tags"):
            read_header(data)
    with pytest.raises(ValueError, match="more than 8 chunks of EXIF data and XMP"):
        read_header(SMALL[:33] + chunk(b"eXIf", b"II*\0\x08\0\0\0") * 9 + SMALL[33:])
