"""JSON that is encoded while its values come, and kept as compact bytes until it is sent.

A tree of an answer is made of dicts, iterators (for lists) and leaves. `parts_of` encodes it a leaf at a time, and what
is Encoded already is never copied as a whole: no step takes longer than its largest leaf.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from router.streams.whole_answers import AnswerRoom

# Bytes that are sent at once, or a little more.
PART_BYTES = 64 * 1024

# Takes the number of bytes that have been added. May raise RequestError.
Grow = Callable[[int], None]


def uncounted(num_bytes: int) -> None:
    """A Grow for what nobody counts."""


class Encoded:
    """The JSON of a value that grows."""

    __slots__ = ("_closing", "_full", "_grow", "_last", "_opening", "num_bytes")

    def __init__(self, opening: bytes, closing: bytes, grow: Grow) -> None:
        self._opening, self._closing, self._grow = opening, closing, grow
        self._full: list[bytes] = []
        self._last = bytearray()
        # Without what opens and closes it: 0 if it is empty.
        self.num_bytes = 0

    def _add(self, data: bytes) -> None:
        self._grow(len(data))
        self.num_bytes += len(data)
        self._last += data
        if len(self._last) >= PART_BYTES:
            self._full.append(bytes(self._last))
            self._last.clear()

    def _inside(self) -> Iterator[bytes]:
        yield from self._full
        yield bytes(self._last)

    def parts(self) -> Iterator[bytes]:
        yield self._opening
        yield from self._inside()
        yield self._closing


class EncodedText(Encoded):
    """A string."""

    __slots__ = ()

    def __init__(self, text: str = "", grow: Grow = uncounted) -> None:
        super().__init__(b'"', b'"', grow)
        self.add(text)

    def add(self, text: str) -> None:
        if text:
            self._add(msgspec.json.encode(text)[1:-1])


class EncodedList(Encoded):
    """A list."""

    __slots__ = ("_before",)

    def __init__(self, grow: Grow = uncounted, before: "EncodedList | None" = None) -> None:
        """before: its first values, which several lists may have."""
        super().__init__(b"[", b"]", grow)
        self._before = before

    def extend(self, values: list[Any]) -> None:
        if values:
            data = msgspec.json.encode(values)
            self._add(b"," + data[1:-1] if self.num_bytes else data[1:-1])

    def _inside(self) -> Iterator[bytes]:
        if self._before is not None and self._before.num_bytes:
            yield from self._before._inside()
            if self.num_bytes:
                yield b","
        yield from super()._inside()


def encode(value: Any) -> bytes:
    """Returns the JSON of a tree in one piece."""
    return msgspec.json.encode(value, enc_hook=_plain)


def _plain(value: Any) -> Any:
    return msgspec.Raw(b"".join(value.parts())) if isinstance(value, Encoded) else list(value)


def parts_of(value: Any) -> Iterator[bytes]:
    """Yields the JSON of a tree."""
    if isinstance(value, Encoded):
        yield from value.parts()
    elif isinstance(value, dict):
        separator = b"{"
        for name, each in value.items():
            yield separator + msgspec.json.encode(name) + b":"
            yield from parts_of(each)
            separator = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, Iterator):
        separator = b"["
        for each in value:
            yield separator
            yield from parts_of(each)
            separator = b","
        yield b"]" if separator == b"," else b"[]"
    else:
        yield encode(value)


class Body:
    """The JSON of an answer that comes whole, in parts, with the room that they take."""

    def __init__(self, room: AnswerRoom) -> None:
        self.room = room
        self.parts: deque[bytes] = deque()
        self.size = 0

    def fill(self, tree: Any) -> Iterator[None]:
        """Encodes a tree, a leaf in each step. What is Encoded has been counted. Raises RequestError."""
        if self.room.size < PART_BYTES:
            # One call takes a fifth of the time.
            self._append(encode(tree))
            self.room.settle(self.size)
            return
        small = bytearray()
        for data in parts_of(tree):
            if len(data) >= PART_BYTES:
                self._append(small)
                self._append(data)
            else:
                small += data
                if len(small) >= PART_BYTES:
                    self._append(small)
            yield
        self._append(small)
        self.room.settle(self.size)

    def _append(self, data: bytes | bytearray) -> None:
        if data:
            # A leaf may be as long as a text.
            step = len(data) if len(data) < 2 * PART_BYTES else PART_BYTES
            self.parts.extend(bytes(data[start : start + step]) for start in range(0, len(data), step))
            self.size += len(data)
            if isinstance(data, bytearray):
                data.clear()
