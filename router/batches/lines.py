"""Reads a batch: a file with one request a line, `{"custom_id", "method", "url", "body"}`.

The file is never held as a whole: only a digest of each custom_id is, 8 bytes in an entry of about 100.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

# Endpoints that a line may name.
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
MAX_CUSTOM_ID_CHARS = 512
_SHOWN_CHARS = 80
_CHUNK = 2**20
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with a line, which is therefore not computed. code: a word for programs."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Line:
    """A request. number: of the line in its file, from 1. body: JSON."""

    number: int
    custom_id: str | None = None
    url: str = ""
    body: bytes = b""
    problem: Problem | None = None


class _Asked(msgspec.Struct):
    custom_id: Any = None
    method: Any = "POST"
    url: Any = None
    body: msgspec.Raw = msgspec.Raw(b"null")


class _Body(msgspec.Struct):
    stream: Any = None


class LineReader:
    """Reads the lines in order; empty ones are left out."""

    def __init__(self, path: Path, most_bytes: int, endpoints: Sequence[str] = ENDPOINTS) -> None:
        """most_bytes: of a line. Raises OSError."""
        self._file, self._most_bytes, self._endpoints = path.open("rb"), most_bytes, endpoints
        self._number = 0
        self._custom_ids: set[bytes] = set()

    def __enter__(self) -> "LineReader":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._file.close()

    def next(self) -> Line | None:
        """Returns the next line; None: there is none. Raises OSError."""
        while text := self._file.readline(self._most_bytes + 1):
            self._number += 1
            if len(text) > self._most_bytes and not text.endswith(b"\n"):
                self._skip_rest()
                message = f"the line has more than {self._most_bytes} bytes, the most that a request may have"
                return Line(self._number, problem=Problem("line_too_long", message))
            if self._number == 1:
                text = text.removeprefix(_BOM)
            if text.strip():
                return self._line(text)
        return None

    def _skip_rest(self) -> None:
        while (part := self._file.readline(_CHUNK)) and not part.endswith(b"\n"):
            pass

    def _line(self, text: bytes) -> Line:
        try:
            asked = msgspec.json.decode(text, type=_Asked)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            # A ValidationError, too: JSON that is no object.
            what = "is nested too deeply" if isinstance(error, RecursionError) else f"is no JSON object: {error}"
            return Line(self._number, problem=Problem("invalid_json_line", f"the line {what}"))
        custom_id = asked.custom_id
        if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS:
            message = f"custom_id={_shown(custom_id)}: use a text of 1 to {MAX_CUSTOM_ID_CHARS} characters"
            return Line(self._number, problem=Problem("invalid_custom_id", message))
        problem = self._problem(asked, custom_id)
        if problem is not None:
            return Line(self._number, custom_id, problem=problem)
        return Line(self._number, custom_id, asked.url, bytes(asked.body))

    def _problem(self, asked: _Asked, custom_id: str) -> Problem | None:
        digest = hashlib.blake2b(custom_id.encode(errors="surrogatepass"), digest_size=8).digest()
        if digest in self._custom_ids:
            message = f"custom_id={_shown(custom_id)} is also that of an earlier line: give each line its own"
            return Problem("duplicate_custom_id", message)
        self._custom_ids.add(digest)
        if asked.method != "POST":
            return Problem("invalid_method", f"method={_shown(asked.method)}: use 'POST'")
        if asked.url not in self._endpoints:
            return Problem("invalid_url", f"url={_shown(asked.url)}: use {' or '.join(map(repr, self._endpoints))}")
        body = bytes(asked.body)
        if not body.startswith(b"{"):
            return Problem("invalid_body", f"body={_shown(body[:_SHOWN_CHARS])}: use an object, the request's fields")
        if msgspec.json.decode(body, type=_Body).stream:
            return Problem("invalid_body", "body.stream=true: the answers of a batch come whole; leave it out")
        return None


def _shown(value: object) -> str:
    text = value.decode(errors="replace") if isinstance(value, bytes) else repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


@dataclass(frozen=True, slots=True)
class Summary:
    """A batch's file at a glance. digest: of its bytes. num_lines: those that are not empty."""

    digest: str
    num_lines: int


def summary_of(path: Path) -> Summary:
    """Reads the file once. Raises OSError."""
    digest, num_lines, is_empty = hashlib.sha256(), 0, True
    with path.open("rb") as file:
        while part := file.readline(_CHUNK):
            digest.update(part)
            # A line longer than a chunk comes in several.
            is_empty = is_empty and not part.removeprefix(_BOM).strip()
            if part.endswith(b"\n"):
                num_lines += not is_empty
                is_empty = True
    return Summary(digest.hexdigest(), num_lines + (not is_empty))
