"""Files of images as anyone may send them: right pixels, or an error that says what is wrong."""

import dataclasses
import io
import struct
import weakref
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile
from transformers.image_transforms import convert_to_rgb

from benchmarks.fuzz.images import chunk
from protos.inference_pb2 import ITEM_KIND_IMAGE, ITEM_KIND_VIDEO, ItemData
from runtime.media.headers import ImageHeader, open_image, read_header
from tests.support.models.vision_models import file_of, item, picture
from worker.encoders import pixels
from worker.encoders.encoder import ItemError
from worker.encoders.pixels import Frames


def _decoded(file: bytes) -> np.ndarray:
    image = Frames(ItemData(kind=ITEM_KIND_IMAGE, files=[file])).decoded(0)
    assert image.mode == "RGB"
    return np.asarray(image)


@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA", "P", "CMYK", "1"])
def test_modes_become_rgb_as_by_transformers(mode: str) -> None:
    image = picture(23, 17, mode="RGBA" if mode in ("LA", "RGBA") else "RGB").convert(mode)
    file = file_of(image, "JPEG" if mode == "CMYK" else "PNG")
    theirs: Any = convert_to_rgb(Image.open(io.BytesIO(file)), return_numpy=True)
    assert np.array_equal(_decoded(file), theirs)


@pytest.mark.parametrize("mode", ["LA", "RGBA", "P"])
def test_squares_of_transparent_pixels_meet(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large images are put on white some pixels at a time."""
    monkeypatch.setattr(pixels, "_SIDE", 8)
    alpha = Image.linear_gradient("L").resize((23, 17))
    image = picture(23, 17, mode="RGBA")
    image.putalpha(alpha)
    file = file_of(image.quantize(16) if mode == "P" else image.convert(mode), "PNG")
    theirs: Any = convert_to_rgb(Image.open(io.BytesIO(file)), return_numpy=True)
    assert np.array_equal(_decoded(file), theirs)


def test_a_transparent_palette_lies_on_white() -> None:
    image = Image.new("P", (4, 4))
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.putpixel((0, 0), 1)
    got = _decoded(file_of(image, "PNG", transparency=0))
    assert got[0, 0].tolist() == [200, 100, 50]
    assert got[1, 1].tolist() == [255, 255, 255]


def test_16_bits_of_grey_become_8() -> None:
    values = (np.arange(12, dtype=np.uint16) * 5000).reshape(3, 4)
    got = _decoded(file_of(Image.fromarray(values)))
    assert np.array_equal(got, np.repeat((values >> 8)[..., None], 3, axis=-1))


@pytest.mark.parametrize(("orientation", "corner"), [(1, (0, 0)), (3, (4, 6)), (6, (0, 4)), (8, (6, 0))])
def test_exif_data_turns_an_image(orientation: int, corner: tuple[int, int]) -> None:
    """corner: row and column to which the pixel at the top left goes."""
    image = Image.new("RGB", (7, 5))
    image.putpixel((0, 0), (255, 0, 0))
    exif = Image.Exif()
    exif[0x0112] = orientation
    got = _decoded(file_of(image, "PNG", exif=exif))
    assert got.shape == ((7, 5, 3) if orientation in (6, 8) else (5, 7, 3))
    assert got[corner].tolist() == [255, 0, 0]


@pytest.mark.parametrize("size", [0, 2**20])
def test_an_image_is_turned_as_its_header_says(size: int) -> None:
    """Routers count by the header, of which they read a MiB of metadata: Pillow would turn this image in any case."""
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>' + b" " * size
    file = file_of(Image.new("RGB", (7, 5)), "WEBP", xmp=xmp)
    header = read_header(file)
    assert _decoded(file).shape == (header.height, header.width, 3) == ((5, 7, 3) if size else (7, 5, 3))


@pytest.mark.parametrize("file_format", ["GIF", "WEBP", "PNG"])
def test_the_first_frame_of_an_animation(file_format: str) -> None:
    frames = [Image.new("RGB", (8, 6), colour) for colour in ((255, 0, 0), (0, 255, 0))]
    options = {"lossless": True} if file_format == "WEBP" else {}
    got = _decoded(file_of(frames[0], file_format, save_all=True, append_images=frames[1:], **options))
    assert got.shape == (6, 8, 3)
    assert got[3, 3].tolist() == [255, 0, 0]


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_a_truncated_file(file_format: str) -> None:
    file = file_of(picture(64, 64), file_format)
    with pytest.raises(ItemError, match=r"can't be decoded|none of these formats"):
        _decoded(file[: len(file) // 2])


def test_one_pixel() -> None:
    assert _decoded(file_of(Image.new("RGB", (1, 1), (1, 2, 3)))).tolist() == [[[1, 2, 3]]]


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"<svg xmlns='http://www.w3.org/2000/svg'/>", id="svg"),
        pytest.param(file_of(picture(8, 8), "TIFF"), id="tiff"),
    ],
)
def test_other_formats_are_refused(file: bytes) -> None:
    with pytest.raises(ItemError, match="use PNG, JPEG, WebP, GIF or BMP"):
        _decoded(file)


def test_a_bomb_is_refused_before_it_is_decoded() -> None:
    """The header alone says 64k x 64k."""
    file = bytearray(file_of(Image.new("L", (1, 1))))
    file[16:24] = (65536).to_bytes(4, "big") * 2
    file[29:33] = zlib.crc32(file[12:29]).to_bytes(4, "big")
    with pytest.raises(ItemError, match=r"65536 x 65536 = 4294967296 pixels: max_item_pixels=268435456"):
        _decoded(bytes(file))


def test_random_bytes_are_errors_or_images() -> None:
    """Nothing but ItemError comes out of damaged files."""
    draws = np.random.default_rng(0)
    files = [file_of(picture(16, 16), file_format) for file_format in ("PNG", "JPEG", "WEBP", "GIF", "BMP")]
    num_errors = 0
    for _ in range(400):
        file = np.frombuffer(files[int(draws.integers(len(files)))], np.uint8).copy()
        file[draws.integers(0, len(file), 4)] = draws.integers(0, 256, 4)
        try:
            _decoded(file.tobytes())
        except ItemError:
            num_errors += 1
    assert 0 < num_errors < 400


def test_frames_of_a_video_have_one_size() -> None:
    with pytest.raises(ItemError, match="frame 1 of a video has 9 x 8 pixels, and the first one 8 x 8"):
        Frames(item([picture(8, 8), picture(9, 8)], is_video=True))
    with pytest.raises(ItemError, match="no frames"):
        Frames(ItemData(kind=ITEM_KIND_VIDEO))
    with pytest.raises(ItemError, match="2 files"):
        Frames(item([picture(8, 8), picture(8, 8)]))


def _bomb(side: int) -> bytes:
    """A text of 64 x 64 stands where others read the size; Pillow would decode side x side."""
    plain = file_of(Image.new("L", (side, side)))
    return plain[:8] + chunk(b"tEXt", struct.pack(">II", 64, 64) + b"\0x") + plain[8:]


def test_a_size_that_is_not_the_headers_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever makes Pillow and the reader of headers differ one day."""

    def another(file: bytes, **options: Any) -> ImageHeader:
        return dataclasses.replace(read_header(file, **options), width=8, height=8)

    monkeypatch.setattr(pixels, "read_header", another)
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda image: pytest.fail("it was decoded"))
    for file_format in ("PNG", "JPEG", "WEBP", "GIF", "BMP"):
        frames = Frames(ItemData(kind=ITEM_KIND_IMAGE, files=[file_of(picture(40, 30), file_format)]))
        with pytest.raises(ItemError, match=f"the {file_format} file has 40 x 30 pixels, and its header 8 x 8"):
            frames.decoded(0)


def test_a_png_with_two_sizes_is_refused() -> None:
    with pytest.raises(ItemError, match="its first chunk is not an IHDR"):
        _decoded(_bomb(300))


def test_frames_are_decoded_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is reserved for frames that were resized, and an image may be a hundred times as large."""
    alive: list[int] = []
    opened: list[weakref.ref[Image.Image]] = []

    def counted(file: bytes, header: ImageHeader) -> ImageFile.ImageFile:
        alive.append(sum(image() is not None for image in opened))
        image = open_image(file, header)
        opened.append(weakref.ref(image))
        return image

    monkeypatch.setattr(pixels, "open_image", counted)
    frames = Frames(item([picture(64, 48) for _ in range(5)], is_video=True))
    assert not opened
    got = frames.resized((6, 8), Image.Resampling.BICUBIC)
    assert (got.shape, alive) == ((5, 6, 8, 3), [0] * 5)
