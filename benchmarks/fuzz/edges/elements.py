"""Messages with as many elements as their bytes have room for, to every method of a router that takes any."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import grpc
import grpc.aio
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from benchmarks.fuzz.edge import Edge
from benchmarks.fuzz.edges.cluster import SmallCluster, small_cluster

# The largest message, as the router takes it by default.
LARGEST_BYTES = 16 * 2**20 - 1024
_METHODS = (
    "octavo.v1.Inference/Generate",
    "octavo.v1.Inference/GenerateUnary",
    "octavo.v1.Inference/Tokenize",
    "octavo.v1.Inference/Detokenize",
    "octavo.v1.Inference/Attach",
    "vllm.Inference/GenerateStream",
    "vllm.Control/Abort",
    "vllm.grpc.engine.VllmEngine/Generate",
    "vllm.grpc.engine.VllmEngine/Abort",
    "sglang.grpc.scheduler.SglangScheduler/Generate",
    "sglang.grpc.scheduler.SglangScheduler/GetLoads",
    "inference.GRPCInferenceService/ModelInfer",
    "inference.GRPCInferenceService/ModelStreamInfer",
)
# In this process, which holds what is sent and what is read of it.
ELEMENTS_MIB = 128
_TICK_S = 0.002
_DEEPEST = 12
_VARINTS = frozenset(
    {
        FieldDescriptor.CPPTYPE_INT32,
        FieldDescriptor.CPPTYPE_INT64,
        FieldDescriptor.CPPTYPE_UINT32,
        FieldDescriptor.CPPTYPE_UINT64,
        FieldDescriptor.CPPTYPE_BOOL,
        FieldDescriptor.CPPTYPE_ENUM,
    }
)


class _Elements:
    """A message is the number of its method, and the bytes that are sent to it."""

    def __init__(self, cluster: SmallCluster, channel: grpc.aio.Channel) -> None:
        self._cluster, self._channel = cluster, channel
        self._inputs = [
            descriptor_pool.Default().FindMethodByName(name.replace("/", ".")).input_type for name in _METHODS
        ]
        # The longest that the event loop was held while it received a message.
        self.most_held_s = 0.0
        self._num_fed, self._is_feeding = 0, False

    def malformed(self, random: Random) -> bytes:
        which = random.randrange(len(_METHODS))
        size = LARGEST_BYTES if random.random() < 0.5 else int(2 ** random.uniform(6, LARGEST_BYTES.bit_length()))
        return bytes([which]) + _filled(self._inputs[which], min(size, LARGEST_BYTES), random, _DEEPEST)

    async def feed(self, message: bytes) -> str:
        self._cluster.tidy()
        call = self._channel.stream_stream("/" + _METHODS[message[0]])(timeout=10)
        data = message[1:]
        self._num_fed, self._is_feeding = self._num_fed + 1, True
        try:
            await call.write(data)
            await call.done_writing()
            async for _ in call:
                call.cancel()
                return "answered"
            return "ended"
        except asyncio.InvalidStateError:
            # The router ended the call before the message was written.
            return (await call.code()).name.lower()
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
                raise
            return error.code().name.lower()
        finally:
            self._is_feeding = False

    async def tick(self) -> None:
        """Measures how long the event loop is held, which is the router's and the client's, until it is cancelled."""
        while True:
            since, used, message, was_feeding = time.monotonic(), time.process_time(), self._num_fed, self._is_feeding
            await asyncio.sleep(_TICK_S)
            if was_feeding and self._is_feeding and self._num_fed == message:
                # Time that this process did not compute went to other processes.
                held = min(time.monotonic() - since - _TICK_S, time.process_time() - used)
                self.most_held_s = max(self.most_held_s, held)

    async def check(self) -> None:
        await self._cluster.check()


def _filled(descriptor: Descriptor | None, size: int, random: Random, depth: int) -> bytes:
    """Returns a message of about `size` bytes that are elements of one field, here or in a message below."""
    assert descriptor is not None
    fields = [each for each in descriptor.fields if random.random() < 0.9]
    inner = [each for each in fields if each.message_type is not None]
    if inner and depth and random.random() < 0.7:
        each = random.choice(inner)
        if each.is_repeated and random.random() < 0.5:
            # Small ones, many times.
            one = _field(each.number, _filled(each.message_type, random.choice((2, 8, 40)), random, depth - 1))
            return one * max(size // len(one), 1)
        return _field(each.number, _filled(each.message_type, max(size - 10, 0), random, depth - 1))
    if not fields or random.random() < 0.1:
        one = random.choice((b"\xd8\x07\x01", b"\xda\x07\x00", b"\xdd\x07abcd", b"\xfa\xff\xff\xff\x0f\x00"))
        return one * (size // len(one))
    each = random.choice(fields)
    if each.message_type is not None and each.message_type.GetOptions().map_entry:
        return _map_of(each, size)
    if each.cpp_type in _VARINTS and each.is_repeated and random.random() < 0.7:
        # Packed.
        return _field(each.number, random.choice((b"\1", b"\x90\x4e")) * (size // 2))
    one = _tag(each.number, 0) + b"\1" if each.cpp_type in _VARINTS else _field(each.number, b"")
    if each.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        number_bytes = 4 if each.cpp_type == FieldDescriptor.CPPTYPE_FLOAT else 8
        one = _tag(each.number, 5 if number_bytes == 4 else 1) + bytes(number_bytes)
    return one * (size // len(one))


def _map_of(field: FieldDescriptor, size: int) -> bytes:
    """Returns entries with different keys: a short text each, or a number."""
    assert field.message_type is not None
    key = field.message_type.fields_by_name["key"]
    entries, length, number = [], 0, 0
    while length < min(size, 2**18):
        text = _varint(number)
        is_text = key.cpp_type == FieldDescriptor.CPPTYPE_STRING
        entries.append(_field(field.number, _field(1, b"%d" % number) if is_text else _tag(1, 0) + text))
        length += len(entries[-1])
        number += 1
    return b"".join(entries) * max(size // max(length, 1), 1)


def _field(number: int, data: bytes) -> bytes:
    return _tag(number, 2) + _varint(len(data)) + data


def _tag(number: int, wire: int) -> bytes:
    return _varint(number << 3 | wire)


def _varint(value: int) -> bytes:
    return bytes([value & 127 | 128]) + _varint(value >> 7) if value > 127 else bytes([value])


@asynccontextmanager
async def elements_edge(directory: Path) -> AsyncIterator[Edge]:
    options = [("grpc.max_send_message_length", -1)]
    async with (
        small_cluster(directory, compat="vllm,smg,sglang,kserve") as cluster,
        grpc.aio.insecure_channel(f"127.0.0.1:{cluster.router.port}", options=options) as channel,
    ):
        edge = _Elements(cluster, channel)
        ticking = asyncio.create_task(edge.tick())
        try:
            yield edge
        finally:
            ticking.cancel()
