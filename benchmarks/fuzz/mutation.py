"""Makes malformed messages: bytes that are changed anywhere, and fields with values that nobody should send."""

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as _F
from google.protobuf.message import Message

_U32, _U64 = 2**32 - 1, 2**64 - 1
_FLOATS = (math.nan, math.inf, -math.inf, 0.0, -0.0, -1.0, 1e-30, 3e38, 5e-324)
_TEXTS = (
    "",
    "\0",
    "a\nb",
    "a\r\nINFO octavo: all is well",
    "x" * 300,
    "é" * 200,
    "\U0001f600",
    "{{ 7 * 7 }}",
    "../../etc/passwd",
    "0",
    "-1",
    "%s%n",
    "\x1b[31m",
    "\ufffe",
    "a" * 5000,
)
_BLOBS = (b"", b"\0", b"\xff" * 33, b"\x80" * 12, bytes(range(256)))
# Integers for a type, by its number of bits and signedness.
_UNSIGNED = {32: (0, 1, 2, 7, 255, 2**16, 2**31, _U32), 64: (0, 1, 2, 2**31, 2**32, 2**53 + 1, 2**63, _U64)}
_SIGNED = {32: (0, 1, -1, 2**31 - 1, -(2**31)), 64: (0, 1, -1, 2**53 + 1, 2**63 - 1, -(2**63))}
_MOST_COPIES = 300
_MOST_COPIED_BYTES = 2**16
_MOST_DEPTH = 8

_BITS = {
    _F.TYPE_UINT32: (_UNSIGNED, 32),
    _F.TYPE_FIXED32: (_UNSIGNED, 32),
    _F.TYPE_UINT64: (_UNSIGNED, 64),
    _F.TYPE_FIXED64: (_UNSIGNED, 64),
    _F.TYPE_INT32: (_SIGNED, 32),
    _F.TYPE_SINT32: (_SIGNED, 32),
    _F.TYPE_SFIXED32: (_SIGNED, 32),
    _F.TYPE_INT64: (_SIGNED, 64),
    _F.TYPE_SINT64: (_SIGNED, 64),
    _F.TYPE_SFIXED64: (_SIGNED, 64),
}


def malformed(seeds: Sequence[Message], random: Random) -> bytes:
    """Returns a serialized message like one of `seeds`; half have hostile fields, most of the others are no message."""
    message = type(seed := random.choice(seeds))()
    message.CopyFrom(seed)
    how = random.random()
    if how < 0.6:
        for _ in range(random.choice((1, 1, 2, 4))):
            spoil(message, random)
    data = message.SerializeToString()
    return data if how < 0.5 else change_bytes(data, random)


# --- Bytes


def change_bytes(data: bytes, random: Random) -> bytes:
    """Flips, cuts, repeats, inserts or replaces bytes, once or several times."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 5))):
        random.choice(_CHANGES)(changed, random)
    return bytes(changed)


def _flip(data: bytearray, random: Random) -> None:
    if data:
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)


def _cut(data: bytearray, random: Random) -> None:
    del data[random.randrange(len(data) + 1) :]


def _repeat(data: bytearray, random: Random) -> None:
    start = random.randrange(len(data) + 1)
    part = bytes(data[start : start + random.randrange(1, 64)])
    data[start:start] = part * random.choice((1, 2, 100))


def _insert(data: bytearray, random: Random) -> None:
    at = random.randrange(len(data) + 1)
    data[at:at] = random.choice(
        (
            b"\xff" * 9 + b"\x01",  # the largest varint
            b"\xff" * 11,  # one that does not end
            b"\x0a\xff\xff\xff\xff\x0f",  # a field of 4 GiB
            b"\x0a\x02" * 150,  # messages within messages
            b"\x0b" * 200,  # groups within groups
            b"\xc3\x28",  # not UTF-8
            b"\xed\xa0\x80",  # half of a surrogate pair
            random.randbytes(random.randrange(1, 32)),
        )
    )


def _replace(data: bytearray, random: Random) -> None:
    data[:] = random.randbytes(random.choice((0, 1, 8, 100, 1000)))


_CHANGES: tuple[Callable[[bytearray, Random], None], ...] = (_flip, _flip, _cut, _repeat, _insert, _replace)


# --- Fields


def spoil(message: Message, random: Random, depth: int = 0) -> None:
    """Gives one field of a message, or of one within it, a value of the right type that makes little sense."""
    fields = message.DESCRIPTOR.fields
    if not fields or depth > _MOST_DEPTH:
        return
    field = random.choice(fields)
    held: Any = getattr(message, field.name)
    if _is_map(field):
        _spoil_map(held, field, random, depth)
    elif field.is_repeated:
        _spoil_repeated(held, field, random, depth)
    elif field.type == _F.TYPE_MESSAGE:
        if random.random() < 0.1:
            message.ClearField(field.name)
        else:
            held.SetInParent()
            spoil(held, random, depth + 1)
    else:
        setattr(message, field.name, hostile(field, random))


def hostile(field: Any, random: Random) -> Any:
    """A hostile value that a scalar field can hold."""
    if field.type in (_F.TYPE_DOUBLE, _F.TYPE_FLOAT):
        return random.choice(_FLOATS)
    if field.type == _F.TYPE_BOOL:
        return random.random() < 0.5
    if field.type == _F.TYPE_STRING:
        return random.choice(_TEXTS)
    if field.type == _F.TYPE_BYTES:
        return random.choice((*_BLOBS, random.randbytes(random.randrange(1, 40))))
    if field.type == _F.TYPE_ENUM:
        return random.choice((0, 1, 2, 3, 4, 5, 99, -1))
    values, bits = _BITS[field.type]
    return random.choice((*values[bits], random.randrange(50)))


def _spoil_map(held: Any, field: Any, random: Random, depth: int) -> None:
    key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    is_deep = value.type == _F.TYPE_MESSAGE
    for _ in range(random.choice((1, 1, 4 if is_deep else 40))):
        if is_deep:
            spoil(held[hostile(key, random)], random, depth + 1)
        else:
            held[hostile(key, random)] = hostile(value, random)


def _spoil_repeated(held: Any, field: Any, random: Random, depth: int) -> None:
    how = random.random()
    if held and how < 0.15:
        del held[random.randrange(len(held)) :]
    elif held and how < 0.3:
        copied = held[random.randrange(len(held))]
        size = copied.ByteSize() if field.type == _F.TYPE_MESSAGE else 1
        held.extend([copied] * min(random.choice((1, 2, _MOST_COPIES)), _MOST_COPIED_BYTES // max(size, 1)))
    elif field.type == _F.TYPE_MESSAGE:
        spoil(random.choice(held) if held and how < 0.8 else held.add(), random, depth + 1)
    elif held and how < 0.7:
        held[random.randrange(len(held))] = hostile(field, random)
    else:
        held.extend(hostile(field, random) for _ in range(random.choice((1, 1, 3, _MOST_COPIES))))


def _is_map(field: Any) -> bool:
    return field.type == _F.TYPE_MESSAGE and field.message_type.GetOptions().map_entry
