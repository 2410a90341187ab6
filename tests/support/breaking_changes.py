"""Changes that break the wire between versions of .proto files: the rules of buf's category WIRE, on descriptors."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    ServiceDescriptorProto,
)


def compiled(folder: Path, files: Sequence[str]) -> dict[str, FileDescriptorProto]:
    """Compiles .proto files, named from `folder`."""
    output = subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", f"-I{folder}", "--descriptor_set_out=/dev/stdout", *files],
        check=True,
        capture_output=True,
        timeout=120,
    ).stdout
    return {each.name: each for each in descriptor_pb2.FileDescriptorSet.FromString(output).file}


def breaking_changes(old: dict[str, FileDescriptorProto], new: dict[str, FileDescriptorProto]) -> list[str]:
    """Returns a line for each change after which one side would misread the other."""
    found: list[str] = []
    messages, enums, services = (_by_name(new, kind) for kind in ("message", "enum", "service"))
    for name, message in _by_name(old, "message").items():
        found += _in_message(name, message, messages.get(name))
    for name, enum in _by_name(old, "enum").items():
        found += _in_enum(name, enum, enums.get(name))
    for name, service in _by_name(old, "service").items():
        found += _in_service(name, service, services.get(name))
    return found


def _by_name(files: dict[str, FileDescriptorProto], kind: str) -> dict:
    found: dict[str, object] = {}
    for file in files.values():
        if kind == "service":
            found |= {f"{file.package}.{each.name}": each for each in file.service}
            continue
        if kind == "enum":
            found |= {f"{file.package}.{each.name}": each for each in file.enum_type}
        for name, message in _messages(file.package, file.message_type):
            if kind == "message":
                found[name] = message
            else:
                found |= {f"{name}.{each.name}": each for each in message.enum_type}
    return found


def _messages(place: str, messages: Sequence[DescriptorProto]) -> Iterator[tuple[str, DescriptorProto]]:
    for message in messages:
        name = f"{place}.{message.name}"
        yield name, message
        yield from _messages(name, message.nested_type)


def _in_message(name: str, old: DescriptorProto, new: DescriptorProto | None) -> Iterator[str]:
    if new is None:
        yield f"{name} is gone: keep the message, or rename its package"
        return
    fields = {field.number: field for field in new.field}
    reserved = [
        number for each in new.reserved_range for number in range(each.start, min(each.end, each.start + 10_000))
    ]
    for field in old.field:
        now = fields.get(field.number)
        if now is None:
            if field.number not in reserved:
                yield f"{name}.{field.name} is gone: write `reserved {field.number};`"
        elif _kind(field) != _kind(now):
            yield f"{name}.{field.name} = {field.number} was {_kind(field)} and is {_kind(now)}: take a new number"
        elif _is_alternative(field) != _is_alternative(now):
            yield f"{name}.{field.name} = {field.number} has come into a oneof, or out of one: take a new number"


def _is_alternative(field: FieldDescriptorProto) -> bool:
    # An optional field is in a oneof of its own, which the wire does not show.
    return field.HasField("oneof_index") and not field.proto3_optional


def _kind(field: FieldDescriptorProto) -> str:
    label = "repeated " if field.label == FieldDescriptorProto.LABEL_REPEATED else ""
    kind = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    return f"{label}{kind} {field.type_name}".strip()


def _in_enum(name: str, old: EnumDescriptorProto, new: EnumDescriptorProto | None) -> Iterator[str]:
    if new is None:
        yield f"{name} is gone"
        return
    numbers = {value.number for value in new.value}
    reserved = [(each.start, each.end) for each in new.reserved_range]
    for value in old.value:
        if value.number not in numbers and not any(start <= value.number <= end for start, end in reserved):
            yield f"{name}.{value.name} is gone: write `reserved {value.number};`"


def _in_service(name: str, old: ServiceDescriptorProto, new: ServiceDescriptorProto | None) -> Iterator[str]:
    if new is None:
        yield f"{name} is gone"
        return
    methods = {method.name: method for method in new.method}
    for method in old.method:
        now = methods.get(method.name)
        if now is None:
            yield f"{name}.{method.name} is gone"
        elif (method.client_streaming, method.server_streaming) != (now.client_streaming, now.server_streaming):
            yield f"{name}.{method.name} streams in another direction than before"
        elif (method.input_type, method.output_type) != (now.input_type, now.output_type):
            yield (
                f"{name}.{method.name} was ({method.input_type}) -> {method.output_type} and is ({now.input_type}) -> "
                f"{now.output_type}"
            )
