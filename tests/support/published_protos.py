"""Messages of other projects, generated from their published .proto files into a pool of their own: some of their names
are in Octavo's files, too."""

import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor
from grpc_tools import protoc


def smg_protos() -> Path:
    """The folder of .proto files in smg-grpc-proto."""
    spec = find_spec("smg_grpc_proto")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "proto"


@cache
def pool_of(folder: Path, file: str) -> descriptor_pool.DescriptorPool:
    """The descriptors of a .proto file and of those that it imports."""
    include = Path(protoc.__file__).parent / "_proto"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"-I{folder}",
            f"-I{include}",
            "--include_imports",
            "--descriptor_set_out=/dev/stdout",
            file,
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    pool = descriptor_pool.DescriptorPool()
    for each in descriptor_pb2.FileDescriptorSet.FromString(done.stdout).file:
        pool.Add(each)
    return pool


def message_class(pool: descriptor_pool.DescriptorPool, name: str) -> Any:
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


def differences(ours: Descriptor, theirs: Descriptor) -> list[str]:
    """Fields of our message that theirs has not, or has with another number, type, label or group of alternatives.

    Messages within are compared by their callers; only their names count here, unless one of them is ours alone.
    """
    found = []
    for field in ours.fields:
        their = theirs.fields_by_name.get(field.name)
        if their is None:
            found.append(f"{ours.full_name}.{field.name} is not in {theirs.full_name}")
            continue
        for kind in ("number", "type", "is_repeated", "has_presence"):
            own, other = getattr(field, kind), getattr(their, kind)
            if own != other:
                found.append(f"{ours.full_name}.{field.name}: {kind} is {own}, theirs {other}")
        groups = [each.containing_oneof and each.containing_oneof.name for each in (field, their)]
        if groups[0] != groups[1]:
            found.append(f"{ours.full_name}.{field.name}: oneof {groups[0]}, theirs {groups[1]}")
    return found
