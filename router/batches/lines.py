"""Reads a batch: a file with one request a line, `{"custom_id", "method", "url", "body"}`.

The file is never held as a whole: only a digest of each custom_id is, 8 bytes in an entry of about 100.
"""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import msgspec

log = logging.getLogger("octavo.router.batches")

# Endpoints that a line may name.
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
MAX_CUSTOM_ID_CHARS = 512
_SHOWN_CHARS = 80
_CHUNK = 2**20
_BOM = b"\xef\xbb\xbf"
_NO_STREAM = (b"null", b"false")


@dataclass(frozen=True, slots=True)
class Problem:
    """The error of a line, which is therefore not computed. code: a word for programs."""

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
    # Raw: a value that can't be decoded, or is large, costs nothing before it is known what it should be.
    custom_id: msgspec.Raw = msgspec.Raw(b"null")
    method: msgspec.Raw = msgspec.Raw(b'"POST"')
    url: msgspec.Raw = msgspec.Raw(b"null")
    body: msgspec.Raw = msgspec.Raw(b"null")


class _Body(msgspec.Struct):
    stream: msgspec.Raw = msgspec.Raw(b"null")


class _BadLine(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.problem = Problem(code, message)


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
        """Reads a line. Everything that depends on its bytes happens inside: whatever is raised is the line's error."""
        custom_id = None
        try:
            asked = msgspec.json.decode(text, type=_Asked)
            custom_id = _text(asked.custom_id, 1, MAX_CUSTOM_ID_CHARS)
            if custom_id is None:
                message = f"custom_id={_shown(asked.custom_id)}: use a text of 1 to {MAX_CUSTOM_ID_CHARS} characters"
                raise _BadLine("invalid_custom_id", message)
            url, body = self._checked(asked, custom_id)
            return Line(self._number, custom_id, url, body)
        except _BadLine as error:
            problem = error.problem
        except RecursionError:
            problem = Problem("invalid_json_line", "the line is nested too deeply")
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            # A ValidationError, too: JSON that is no object.
            problem = Problem("invalid_json_line", f"the line is no JSON object: {error}")
        except Exception as error:
            log.exception("line %d of a batch can't be read", self._number)
            problem = Problem("invalid_json_line", f"the line can't be read: {type(error).__name__}")
        return Line(self._number, custom_id, problem=problem)

    def _checked(self, asked: _Asked, custom_id: str) -> tuple[str, bytes]:
        """Returns the url and the body. Raises _BadLine, msgspec.DecodeError, UnicodeDecodeError, RecursionError."""
        digest = hashlib.blake2b(custom_id.encode(), digest_size=8).digest()
        if digest in self._custom_ids:
            message = f"custom_id={_shown(asked.custom_id)} is also that of an earlier line: give each line its own"
            raise _BadLine("duplicate_custom_id", message)
        self._custom_ids.add(digest)
        if _text(asked.method) != "POST":
            raise _BadLine("invalid_method", f"method={_shown(asked.method)}: use 'POST'")
        url = _text(asked.url)
        if url is None or url not in self._endpoints:
            allowed = " or ".join(map(repr, self._endpoints))
            raise _BadLine("invalid_url", f"url={_shown(asked.url)}: use {allowed}")
        body = bytes(asked.body)
        if not body.startswith(b"{"):
            raise _BadLine("invalid_body", f"body={_shown(asked.body)}: use an object, the request's fields")
        # Anything else could be read as true.
        stream = msgspec.json.decode(body, type=_Body).stream
        if bytes(stream) not in _NO_STREAM:
            message = f"body.stream={_shown(stream)}: the answers of a batch come whole; leave it out"
            raise _BadLine("invalid_body", message)
        return url, body


def _text(value: msgspec.Raw, least_chars: int = 0, most_chars: int = _SHOWN_CHARS) -> str | None:
    """Returns a JSON string of so many characters; None: it is something else. Raises UnicodeDecodeError."""
    raw = memoryview(value)
    # A character may be two escapes of six bytes.
    if raw.nbytes > 12 * most_chars + 2 or raw[:1] != b'"':
        return None
    text: str = msgspec.json.decode(raw, type=str)
    return text if least_chars <= len(text) <= most_chars else None


def _shown(value: msgspec.Raw) -> str:
    raw = memoryview(value)
    text = bytes(raw[:_SHOWN_CHARS]).decode(errors="replace")
    return text if raw.nbytes <= _SHOWN_CHARS else f"{text}..."


@dataclass(frozen=True, slots=True)
class Summary:
    """A batch's file at a glance. digest: of its bytes. num_lines: those that are not empty. is_whole: all was read."""

    digest: str
    num_lines: int
    is_whole: bool = True


def summary_of(path: Path, most_lines: int = 2**63) -> Summary:
    """Reads the file once. most_lines: after so many, with empty ones, no more is read. Raises OSError."""
    digest, num_lines, num_all, is_empty, bom = hashlib.sha256(), 0, 0, True, _BOM
    with path.open("rb") as file:
        while part := file.readline(_CHUNK):
            if num_all >= most_lines:
                return Summary(digest.hexdigest(), num_lines, is_whole=False)
            digest.update(part)
            # A line longer than a chunk comes in several.
            is_empty = is_empty and not part.removeprefix(bom).strip()
            bom = b""
            if part.endswith(b"\n"):
                num_lines += not is_empty
                num_all += 1
                is_empty = True
    return Summary(digest.hexdigest(), num_lines + (not is_empty))
