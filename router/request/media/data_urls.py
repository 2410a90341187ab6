"""data: URIs (RFC 2397) with base64, as HTTP's clients send images."""

import binascii
import time
from collections.abc import Iterator

_MOST_HEADER = 256
# base64 holds the interpreter's lock: 4 ms a MB. Between two slices other threads get it; on its own, the interpreter
# would let them wait for 5 ms each time.
_SLICE = 2**18


def is_data_url(url: str) -> bool:
    return url[:5].lower() == "data:"


def decode_data_url(url: str) -> tuple[bytes, str]:
    """Returns the data and its mime type; empty: none is told. Raises ValueError."""
    files, mime_type = decode_all(url)
    if len(files) != 1:
        raise ValueError(f"the data: URI has {len(files)} parts of base64: one is an image")
    return files[0], mime_type


def decode_all(url: str) -> tuple[list[bytes], str]:
    """Returns the data of each part of base64, which commas separate, and the mime type of all. Raises ValueError."""
    head, comma, rest = url[:_MOST_HEADER].partition(",")
    if not comma:
        raise ValueError("the data: URI has no comma: use data:image/png;base64,...")
    mime_type, *parameters = head[5:].split(";")
    if not parameters or parameters[-1].strip().lower() != "base64":
        raise ValueError(f"the data: URI begins with {head[:60]!r}: use data:image/png;base64,...")
    start = len(head) + 1
    del rest
    return [decode_base64(part) for part in _parts(url, start)], mime_type.strip()


def _parts(url: str, start: int) -> Iterator[str]:
    while (end := url.find(",", start)) >= 0:
        yield url[start:end]
        start = end + 1
    yield url[start:]


def decode_base64(text: str) -> bytes:
    """Raises ValueError."""
    decoded = bytearray()
    # A slice must not end within a group of four, nor anything follow the padding.
    for start in range(0, len(text), _SLICE):
        part = text[start : start + _SLICE]
        if "=" in part and start + _SLICE < len(text):
            raise ValueError("its base64 has '=' before its end: send it without anything behind the padding")
        try:
            decoded += binascii.a2b_base64(part, strict_mode=True)
        except (binascii.Error, ValueError) as error:
            raise ValueError(
                f"its base64 can't be decoded ({error}): use A-Z, a-z, 0-9, +, / and = at the end"
            ) from None
        time.sleep(0)
    return bytes(decoded)
