"""Counts the elements of a serialized message without parsing it, up to the bounds of router/api/element_bounds.py.

It reads tags and lengths alone, so that a message of 16 MiB with an image takes a few steps, and one of tiny elements
ends at the first bound. It goes on in slices, between which an event loop has its turn.
"""

import re
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from functools import cache

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from router.api.element_bounds import MAX_DEPTH, MAX_ELEMENTS, MAX_FIELDS, MAX_NUMBERS, MAX_OTHER_BYTES, WITH_PROMPT
from router.errors import InvalidRequest

# Fields of a slice, and bytes of packed numbers: 1 ms.
_SLICE_FIELDS, _SLICE_BYTES = 2_048, 2**20
# Memory that a field takes once it is parsed, at most, besides its bytes: measured, of messages of all kinds, and of
# maps. And a number of a packed field.
_FIELD_BYTES, _NUMBER_BYTES = 128, 8
# Bytes of a varint that do not end one.
_NOT_LAST = bytes(range(128, 256))
_WHOLE_VARINT = re.compile(rb"[\x80-\xff]{0,9}[\x00-\x7f]")
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED = {
    **dict.fromkeys((FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_SFIXED64), 8),
    **dict.fromkeys((FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_FIXED32, FieldDescriptor.TYPE_SFIXED32), 4),
}
_NOT_PACKED = frozenset(
    {
        FieldDescriptor.TYPE_STRING,
        FieldDescriptor.TYPE_BYTES,
        FieldDescriptor.TYPE_MESSAGE,
        FieldDescriptor.TYPE_GROUP,
    }
)


@dataclass(slots=True, eq=False)
class _Field:
    """A known field. most: elements, if it is repeated, else -1. number_bytes: of a packed number; 0: a varint; -1: it
    can't be packed. fields: of a submessage, by tag, which is number and wire type."""

    name: str
    most: int
    number_bytes: int
    index: int
    fields: "dict[int, _Field] | None" = None


@dataclass(slots=True)
class Plan:
    """The fields to count in messages of one type."""

    fields: dict[int, _Field] = field(default_factory=dict)
    num_fields: int = 0
    takes_prompt: bool = False


@dataclass(slots=True)
class Count:
    """Counts of a message: fields on the wire, numbers in packed fields, and bytes of unknown fields."""

    num_fields: int = 0
    num_numbers: int = 0
    unknown_bytes: int = 0

    @property
    def expanded_bytes(self) -> int:
        """Memory that the parsed message takes besides the bytes of the serialized one."""
        return self.num_fields * _FIELD_BYTES + self.num_numbers * _NUMBER_BYTES


@cache
def plan_of_method(method: str) -> Plan:
    """method: /package.Service/Method. Of a method without descriptor, nothing is known."""
    name = method.lstrip("/").replace("/", ".")
    try:
        descriptor = descriptor_pool.Default().FindMethodByName(name).input_type
    except KeyError:
        return Plan()
    return plan_of(descriptor)


@cache
def plan_of(descriptor: Descriptor) -> Plan:
    plan = Plan(takes_prompt=descriptor.full_name in WITH_PROMPT)
    plan.fields = _fields_of(descriptor, plan, {})
    return plan


def _fields_of(descriptor: Descriptor, plan: Plan, known: dict[str, dict[int, _Field]]) -> dict[int, _Field]:
    if descriptor.full_name in known:
        return known[descriptor.full_name]
    fields: dict[int, _Field] = {}
    known[descriptor.full_name] = fields
    for each in descriptor.fields:
        number_bytes = -1 if each.type in _NOT_PACKED else _FIXED.get(each.type, 0)
        most = MAX_ELEMENTS[each.full_name] if each.is_repeated else -1
        one = _Field(each.name, most, number_bytes, plan.num_fields)
        plan.num_fields += 1
        for wire in _wire_types(number_bytes, is_repeated=each.is_repeated):
            fields[each.number << 3 | wire] = one
        if each.message_type is not None:
            one.fields = _fields_of(each.message_type, plan, known)
    return fields


def _wire_types(number_bytes: int, *, is_repeated: bool) -> set[int]:
    """A field of any other wire type is an unknown one."""
    if number_bytes < 0:
        return {_BYTES}
    one = {0: _VARINT, 4: _FIXED32, 8: _FIXED64}[number_bytes]
    return {one, _BYTES} if is_repeated else {one}


def count_all(data: bytes, plan: Plan) -> Count:
    """Does what `counting` does, at once."""
    count = Count()
    for _ in counting(data, plan, count):
        pass
    return count


def counting(data: bytes, plan: Plan, count: Count) -> Generator[None, None, None]:
    """Counts into `count`, a slice a step. Raises InvalidRequest for what is beyond a bound, or no message."""
    if len(data) > MAX_OTHER_BYTES and not plan.takes_prompt:
        raise InvalidRequest(
            f"the message has {len(data)} bytes, but it has no prompt: use at most {MAX_OTHER_BYTES} bytes"
        )
    try:
        yield from _counting(data, plan, count)
    except IndexError:
        raise _malformed(len(data), "it ends within a field") from None


def _counting(data: bytes, plan: Plan, count: Count) -> Generator[None, None, None]:
    fields, end, position, num_fields = plan.fields, len(data), 0, 0
    # The messages around this one: their fields, ends and names.
    outer: list[tuple[dict[int, _Field], int, str]] = []
    num_elements = [0] * plan.num_fields
    slice_end = _SLICE_FIELDS
    # A field that has too many elements; the rest of the slice says how many.
    beyond: tuple[_Field, str] | None = None
    while True:
        if position >= end:
            if position > end:
                raise _malformed(position, "a field is longer than the message around it")
            if not outer:
                break
            fields, end, _ = outer.pop()
            continue
        num_fields += 1
        if num_fields > slice_end:
            if beyond is not None:
                raise _beyond(beyond)
            if num_fields > MAX_FIELDS:
                raise InvalidRequest(f"the message has more than {MAX_FIELDS} fields in all: use at most that many")
            slice_end += _SLICE_FIELDS
            yield
        began = position
        tag = data[position]
        position += 1
        if tag > 127:
            # Counts twice, for it takes longer; the most frequent fields have one byte.
            num_fields += 1
            tag, position = _varint(data, began)
        wire = tag & 7
        found = fields.get(tag)
        if wire != _BYTES:
            if wire == _VARINT and data[position] < 128:
                position += 1
            else:
                position = _behind(data, position, wire)
            if found is None:
                count.unknown_bytes += position - began
                continue
            if found.most < 0:
                continue
            num_elements[found.index] += 1
        else:
            length = data[position]
            position += 1
            if length > 127:
                length, position = _varint(data, position - 1)
            inner = position
            position += length
            if found is None:
                count.unknown_bytes += position - began
                continue
            if found.most >= 0:
                if found.number_bytes < 0:
                    num_elements[found.index] += 1
                elif position <= end:
                    for num_numbers in _num_packed(data, inner, position, found.number_bytes):
                        num_elements[found.index] += num_numbers
                        count.num_numbers += num_numbers
                        if num_elements[found.index] > found.most or count.num_numbers > MAX_NUMBERS:
                            break
                        if length > _SLICE_BYTES:
                            yield
            if found.fields is not None:
                if position > end:
                    raise _malformed(began, "a message is longer than the one around it")
                outer.append((fields, end, found.name))
                if len(outer) > MAX_DEPTH:
                    raise _malformed(began, f"messages are nested deeper than {MAX_DEPTH}")
                fields, end, position = found.fields, position, inner
            if found.most < 0:
                continue
        if num_elements[found.index] > found.most and beyond is None:
            names = [name for *_, name in outer]
            beyond = found, ".".join(names if found.fields is not None else [*names, found.name])
            if num_elements[found.index] > found.most + _SLICE_FIELDS:
                raise _beyond(beyond)
        if count.num_numbers > MAX_NUMBERS:
            if beyond is not None:
                raise _beyond(beyond)
            raise InvalidRequest(f"the message has more than {MAX_NUMBERS} numbers in lists: use at most that many")
    if beyond is not None:
        raise _beyond(beyond, num_elements)
    count.num_fields = num_fields


def _num_packed(data: bytes, begin: int, end: int, number_bytes: int) -> Iterator[int]:
    """Yields how many numbers a packed field has, piece by piece."""
    if number_bytes:
        yield (end - begin) // number_bytes
        return
    for start in range(begin, end, _SLICE_BYTES):
        yield len(data[start : min(start + _SLICE_BYTES, end)].translate(None, _NOT_LAST))


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Returns a tag or length of two bytes or more, and the position behind it. Raises IndexError at the data's end."""
    if data[position + 1] < 128 <= data[position]:
        return data[position] & 127 | data[position + 1] << 7, position + 2
    value = shift = 0
    for at in range(position, position + 5):
        byte = data[at]
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at + 1
        shift += 7
    raise _malformed(position, "a tag or a length has more than 5 bytes")


def _behind(data: bytes, position: int, wire: int) -> int:
    """Returns the position behind a field that has no length."""
    if wire == _VARINT:
        found = _WHOLE_VARINT.match(data, position)
        if found is None:
            raise _malformed(position, "a number does not end")
        return found.end()
    if wire == _FIXED32:
        return position + 4
    if wire == _FIXED64:
        return position + 8
    raise _malformed(position, f"wire type {wire} is not one of proto3's")


def _beyond(beyond: tuple[_Field, str], num_elements: list[int] | None = None) -> InvalidRequest:
    """num_elements: if all have been counted."""
    found, path = beyond
    number = f"more than {found.most}" if num_elements is None else num_elements[found.index]
    return InvalidRequest(f"{path} has {number} entries: use at most {found.most}")


def _malformed(position: int, why: str) -> InvalidRequest:
    return InvalidRequest(f"the message can't be read at byte {position}: {why}")
