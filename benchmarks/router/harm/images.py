"""Requests with images in large files, for benchmarks.router.harm.attacks: as large as a message may be."""

import base64
import functools
import io
import itertools
import struct
import zlib
from collections.abc import Iterator, Sequence

from PIL import Image

from benchmarks.router.fake_scheduler import IMAGE_TOKEN
from protos import inference_pb2 as pb

_FILE_BYTES = 15_000_000


def _file(form: str) -> bytes:
    written = io.BytesIO()
    Image.new("RGB", (60, 90), (9, 99, 199)).save(written, form)
    return written.getvalue()


def _segment(marker: int, body: bytes) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


@functools.cache
def large_files() -> Sequence[bytes]:
    """JPEG: with much behind the image, with long segments and with short ones before it; a PNG with 60,000 texts and
    much behind; a GIF with a long comment."""
    jpeg, png, gif = _file("JPEG"), _file("PNG"), _file("GIF")
    long, short = _segment(0xE5, bytes(65_000)), _segment(0xE1, b"Exif\0\0xx")
    head = 13 + (3 << ((gif[10] & 7) + 1))
    return (
        jpeg + bytes(_FILE_BYTES),
        jpeg[:2] + long * (_FILE_BYTES // len(long)) + jpeg[2:],
        jpeg[:2] + short * (_FILE_BYTES // len(short)) + jpeg[2:],
        png[:33] + _chunk(b"tEXt", b"a\0b") * 60_000 + png[33:] + bytes(_FILE_BYTES // 2),
        gif[:head] + b"\x21\xfe" + (b"\xff" + bytes(255)) * (_FILE_BYTES // 256) + b"\0" + gif[head:],
    )


def requests(seed: int) -> Iterator[pb.GenerateRequest]:
    """The files as they are and in base64; every second request has no place for its image. seed: where to begin."""
    files = large_files()
    for number in itertools.count(seed):
        file = files[number % len(files)]
        image = pb.Image(data=file)
        if number % 4 >= 2:
            image = pb.Image(url=f"data:;base64,{base64.b64encode(file[:11_000_000]).decode()}")
        ids = [1000, IMAGE_TOKEN, 1000] if number % 2 else [1000]
        sampling = pb.SamplingParams(max_tokens=1, seed=number)
        yield pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), items=[pb.Item(image=image)], sampling=sampling)
