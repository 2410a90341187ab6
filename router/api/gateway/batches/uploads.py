"""Receives a file that comes as multipart/form-data, without ever holding it as a whole."""

from pathlib import Path
from typing import IO

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from router.api.gateway.errors import BadRequestError

PURPOSE = "batch"
_FILENAME_CHARS = 255
# The most of a field besides the file; what is longer is not one that is known.
_FIELD_BYTES = 1024
_MOST_PARTS = 16


class Upload:
    """Writes the part `file` to a path, and keeps the part `purpose`. Its methods are for threads."""

    def __init__(self, content_type: str, path: Path) -> None:
        """content_type: the request's header. Raises BadRequestError, OSError."""
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise BadRequestError("send the file as multipart/form-data, with the fields `purpose` and `file`")
        self.filename: str | None = None
        self._purpose = bytearray()
        self._header, self._value, self._name, self._num_parts = bytearray(), bytearray(), b"", 0
        self._is_open = self._is_done = False
        self._file: IO[bytes] = path.open("wb")
        try:
            self._parser = MultipartParser(
                options[b"boundary"],
                {
                    "on_part_begin": self._begin_part,
                    "on_part_data": self._take_data,
                    "on_part_end": self._end_part,
                    "on_header_field": self._take_header,
                    "on_header_value": self._take_value,
                    "on_header_end": self._end_header,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            self._file.close()
            raise BadRequestError(f"the body is not multipart/form-data: {error}") from None

    def feed(self, data: bytes) -> None:
        """Takes the next bytes of the body. Raises BadRequestError, OSError."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise BadRequestError(f"the body is not multipart/form-data: {error}") from None

    def finish(self) -> None:
        """Checks that all has come. Raises BadRequestError, OSError."""
        self._file.close()
        if not self._is_done:
            raise BadRequestError("the body ends before its last boundary")
        purpose = self._purpose.decode(errors="replace")
        if purpose != PURPOSE:
            raise BadRequestError(f"purpose={purpose[:80]!r}: use {PURPOSE!r}", param="purpose")
        if self.filename is None:
            raise BadRequestError("file is missing: send one with a file name", param="file")

    def close(self) -> None:
        self._file.close()

    # --- The parser's callbacks

    def _begin_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MOST_PARTS:
            raise BadRequestError(f"the body has more than {_MOST_PARTS} parts")
        self._name, self._is_open = b"", False

    def _take_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _take_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(bytes(self._value))
            self._name = options.get(b"name", b"")
            if self._name == b"file":
                if self.filename is not None:
                    raise BadRequestError("file is there twice: send one", param="file")
                self.filename = options.get(b"filename", b"file").decode(errors="replace")[:_FILENAME_CHARS]
                self._is_open = True
        self._header.clear()
        self._value.clear()

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_open:
            self._file.write(data[start:end])
        elif self._name == b"purpose":
            self._purpose += data[start:end][:_FIELD_BYTES]
            del self._purpose[_FIELD_BYTES:]

    def _end_part(self) -> None:
        self._is_open = False

    def _end(self) -> None:
        self._is_done = True
