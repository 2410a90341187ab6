"""Writes the lines of a batch's output: `{"id", "custom_id", "response", "error"}`.

A line's id names the batch and the number of the line in its input, so that an output tells which lines it has.
"""

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from router.batches.lines import Line, Problem

# Digits of a batch's key that an id shows.
KEY_DIGITS = 24
_ID = re.compile(rf"batch_req_([0-9a-f]{{{KEY_DIGITS}}})_([1-9][0-9]{{0,17}})")

# Where the body of an answer comes. JSON has no such byte.
_HERE = b"\0"
_PART_BYTES = 2**20
_LINE_ENDS = {character.encode(): f"\\u{ord(character):04x}".encode() for character in "\x85\u2028\u2029"}


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: Any = None


class _Written(msgspec.Struct):
    id: str
    custom_id: str | None
    response: _Response | None
    error: Any = None


class _Status(msgspec.Struct):
    status_code: int


class _ReadBack(msgspec.Struct):
    """The fields read of a written line. The answer itself is skipped: no number or text in it can be out of range."""

    id: str
    response: _Status | None


def line_id(key: str, number: int) -> str:
    """Returns the id of a line; it is also its request's. key: a digest of the batch."""
    return f"batch_req_{key[:KEY_DIGITS]}_{number}"


def answer_line(key: str, line: Line, status: int, body: bytes, *, is_own: bool = False) -> bytes:
    """Returns the output line of a request that a server has answered. is_own: this process: it is JSON on one line.

    The body of an own answer is taken over a part at a time: a thread that does so holds up no other one."""
    own_id = line_id(key, line.number)
    if is_own and body:
        written = _encode(_Written(own_id, line.custom_id, _Response(status, own_id, msgspec.Raw(_HERE))))
        before, _, after = written.partition(_HERE)
        return b"".join([before, *map(_on_one_line, _parts(body)), after])
    try:
        written = _encode(_Written(own_id, line.custom_id, _Response(status, own_id, _as_json(body))))
        read_back(key, written)
    except RecursionError:
        # The answer is nested as deeply as JSON may be, and is now within a line.
        written = _encode(_Written(own_id, line.custom_id, _Response(status, own_id, body.decode(errors="replace"))))
    return written


def problem_line(key: str, line: Line, problem: Problem) -> bytes:
    """Returns the output line of a request that was not computed."""
    error = {"code": problem.code, "message": problem.message, "line": line.number}
    return _encode(_Written(line_id(key, line.number), line.custom_id, None, error))


_BEGINNING = b'{"id":"batch_req_'


def could_begin(line: bytes) -> bool:
    """Tells whether a batch's output, torn or not, may have this first line."""
    return line.startswith(_BEGINNING[: len(line)]) or not line.strip(b"\0\n")


class OtherOutputError(ValueError):
    """A line is not one of this batch's output."""


def read_back(key: str, line: bytes) -> tuple[int, bool]:
    """Returns a written line's number in the input, and whether its request succeeded.

    Raises msgspec.DecodeError if it is not whole, OtherOutputError if another batch wrote it.
    """
    written = msgspec.json.decode(line, type=_ReadBack)
    found = _ID.fullmatch(written.id)
    if found is None or found[1] != key[:KEY_DIGITS]:
        raise OtherOutputError(f"a line has the id {written.id[:80]!r}: the output of another batch")
    return int(found[2]), written.response is not None and is_success(written.response.status_code)


def is_success(status: int) -> bool:
    return 200 <= status < 300


def _as_json(body: bytes) -> Any:
    try:
        # Other servers may break lines within their JSON.
        return msgspec.json.decode(body) if b"\n" in body else msgspec.Raw(_checked(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body.decode(errors="replace")


def _checked(body: bytes) -> bytes:
    msgspec.json.decode(body, type=msgspec.Raw)
    # Strings that are skipped are not looked at.
    body.decode()
    return body


def _encode(written: _Written) -> bytes:
    return _on_one_line(msgspec.json.encode(written)) + b"\n"


def _on_one_line(text: bytes) -> bytes:
    # Some readers take these characters for the end of a line, too (Python's str.splitlines).
    for character, escape in _LINE_ENDS.items():
        text = text.replace(character, escape)
    return text


def _parts(body: bytes) -> Iterator[bytes]:
    """Yields whole characters."""
    start = 0
    while start < len(body):
        end = min(start + _PART_BYTES, len(body))
        while end < len(body) and body[end] & 0xC0 == 0x80:
            end -= 1
        yield body[start:end]
        start = end
