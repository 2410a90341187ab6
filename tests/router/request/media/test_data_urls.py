"""data: URIs with base64, as clients send them."""

import base64
import os

import pytest

from router.request.media.data_urls import decode_all, decode_base64, decode_data_url


def test_data_and_mime_type() -> None:
    for size in (0, 1, 2, 3, 100, 2**18, 2**18 + 1, 700_001):
        data = os.urandom(size)
        coded = base64.b64encode(data).decode()
        assert decode_data_url(f"data:image/png;base64,{coded}") == (data, "image/png")
        assert decode_data_url(f"DATA:;BASE64,{coded}") == (data, "")
    assert decode_data_url("data:image/png;charset=x;base64,AAAA") == (b"\0\0\0", "image/png")


def test_several_files_of_a_video() -> None:
    assert decode_all("data:video/jpeg;base64,AAAA,AQID") == ([b"\0\0\0", b"\1\2\3"], "video/jpeg")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("data:image/png", "has no comma"),
        ("data:image/png,%89PNG", "begins with 'data:image/png': use data:image/png;base64"),
        ("data:image/png;base64,AA", "can't be decoded"),
        ("data:image/png;base64,AA==AAAA", "can't be decoded"),
        ("data:image/png;base64,A A=", "can't be decoded"),
        ("data:image/png;base64,-_-_", "can't be decoded"),
        ("data:image/png;base64,AAA\N{CYRILLIC SMALL LETTER A}", "can't be decoded"),
        ("data:image/png;base64,AAAA,AAAA", "has 2 parts of base64"),
    ],
)
def test_what_is_wrong_is_told(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        decode_data_url(url)


def test_padding_between_slices() -> None:
    with pytest.raises(ValueError, match="has '=' before its end"):
        decode_base64("A" * (2**18 - 4) + "AA==" + "AAAA")
