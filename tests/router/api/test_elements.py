"""Elements are counted before they are parsed: every list and map has a bound, and no message gets around them."""

import contextlib
import json
from collections.abc import Iterator
from random import Random

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm_engine

from benchmarks.fuzz.edges.client_grpc import CHAT, CHAT_WITH_JSON, REQUESTS
from benchmarks.fuzz.mutation import change_bytes
from configs.sampling import MAX_STOP_STRINGS
from protos import admin_pb2, inference_pb2
from protos import inference_pb2 as pb
from router.api import elements
from router.api.element_bounds import MAX_ELEMENTS, MAX_FIELDS, MAX_NUMBERS, MAX_OTHER_BYTES, WITH_PROMPT
from router.api.elements import Count, count_all, counting, plan_of, plan_of_method
from router.api.gateway.errors import BadRequestError
from router.api.gateway.reading.parsing import parse_to_bytes
from router.compat.protos import kserve_pb2, sglang_pb2, vllm_pb2
from router.errors import InvalidRequest
from router.request.chat import MAX_CHAT_MESSAGES

FILES = (
    inference_pb2,
    admin_pb2,
    vllm_pb2,
    sglang_pb2,
    kserve_pb2,
    vllm_engine,
    health_pb2,
    reflection_pb2,
)
GENERATE = plan_of(pb.GenerateRequest.DESCRIPTOR)


def _asked() -> Iterator[Descriptor]:
    """The messages that clients send."""
    for file in FILES:
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                yield method.input_type


def _lists(descriptor: Descriptor, seen: set[str]) -> Iterator[str]:
    if descriptor.full_name in seen:
        return
    seen.add(descriptor.full_name)
    for field in descriptor.fields:
        if field.is_repeated:
            yield field.full_name
        if field.message_type is not None:
            yield from _lists(field.message_type, seen)


def test_every_list_and_map_that_a_client_can_send_has_a_bound() -> None:
    seen: set[str] = set()
    assert {name for each in _asked() for name in _lists(each, seen)} == set(MAX_ELEMENTS)
    assert set(WITH_PROMPT) <= {each.full_name for each in _asked()}


def _varint(value: int) -> bytes:
    return bytes([value & 127 | 128]) + _varint(value >> 7) if value > 127 else bytes([value])


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _in_chat(data: bytes) -> bytes:
    return _field(4, data)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (_in_chat(b"\x0a\x00" * (MAX_CHAT_MESSAGES + 1)), r"^chat\.messages has 16385 entries: use at most 16384$"),
        (_in_chat(b"\x0a\x00" * 4_000_000), r"^chat\.messages has more than \d+ entries: use at most 16384"),
        (_in_chat(_field(1, b"\x3a\x02\x0a\x00" * 40_000)), r"has more than 65536 fields in all"),
        (_in_chat(_field(1, b"\x3a\x00" * 32_769)), r"^chat\.messages\.parts has 32769 entries"),
        (_in_chat(b"\x3a\x00" * 1025), r"^chat\.tools has 1025 entries: use at most 1024"),
        # In two parts of one message, which the parser merges.
        (_in_chat(b"\x3a\x00" * 600) * 2, r"^chat\.tools has 1200 entries"),
        (_field(6, b"\x6a\x00" * (MAX_STOP_STRINGS + 1)), r"^sampling\.stop has 17 entries: use at most 16"),
        (_field(5, _field(1, b"\1" * (MAX_NUMBERS + 1))), r"^token_ids\.ids has more than 2097152 entries"),
        (_field(5, _field(1, b"\xff\x01" * (MAX_NUMBERS + 1))), r"^token_ids\.ids has more than 2097152 entries"),
        (_field(5, b"\x08\x01" * (MAX_FIELDS + 1)), r"more than 65536 fields"),
        # Prompt and outputs of a resume, each within its bound.
        (_field(9, _field(2, b"\1" * 2**20) + _field(3, _field(2, b"\1" * (2**20 + 1)))), r"more than 2097152 numbers"),
        (_field(6, b"".join(_field(8, b"\x08" + _varint(i)) for i in range(1025))), r"^sampling\.logit_bias has 1025"),
        (b"\x38\x00" * (MAX_FIELDS + 1), r"more than 65536 fields"),
        (b"\xd0\x3e\x00" * (MAX_FIELDS + 1), r"more than 65536 fields"),
        (_in_chat(_field(3, _field(1, b"\x0a\x01a") * 20_000)), r"^chat\.template_arguments\.fields has"),
        (b"\x0b\x0c", r"can't be read at byte 1: wire type 3 is not one"),
        (b"\x0a\x05abc", r"can't be read at byte \d+: a field is longer"),
        (_in_chat(b"\x0a\x05ab"), r"can't be read at byte \d+: a message is longer"),
        (b"\x38", r"can't be read at byte 1: it ends within a field"),
        (b"\x38" + b"\xff" * 11, r"a number does not end"),
        (b"\x0a" + b"\xff" * 6, r"a tag or a length has more than 5 bytes"),
    ],
)
def test_what_is_beyond_a_bound_is_named(message: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        count_all(message, GENERATE)


def _num_steps(message: bytes) -> int:
    """Counts the slices of a message that is refused."""
    number, steps = 0, counting(message, GENERATE, Count())
    with contextlib.suppress(InvalidRequest):
        for _ in steps:
            number += 1
        raise AssertionError("it is not refused")
    return number


def test_counting_ends_within_a_bound_of_fields() -> None:
    # A few thousand of 4 million elements are looked at, a slice in each step.
    assert _num_steps(_in_chat(b"\x0a\x00" * 4_000_000)) <= MAX_CHAT_MESSAGES // 2_048 + 1
    # So it is with those that no bound of a field ends.
    assert _num_steps(b"\x38\x00" * 4_000_000) <= MAX_FIELDS // 2_048


def test_messages_of_real_use_pass() -> None:
    words = "word " * 100
    told = [pb.ChatMessage(role="user", content=words) for _ in range(MAX_CHAT_MESSAGES)]
    chat = pb.GenerateRequest(chat=pb.ChatPrompt(messages=told))
    count = count_all(chat.SerializeToString(), GENERATE)
    assert (count.num_fields, count.unknown_bytes) == (1 + 3 * MAX_CHAT_MESSAGES, 0)
    count = count_all(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[70_000] * 2**20)).SerializeToString(), GENERATE)
    assert count.num_numbers == 2**20
    image = pb.GenerateRequest(items=[pb.Item(image=pb.Image(data=bytes(10 * 2**20)))]).SerializeToString()
    assert count_all(image, GENERATE).expanded_bytes < 1_000


def test_lists_of_other_kinds_of_numbers_are_counted() -> None:
    tensor = kserve_pb2.ModelInferRequest.InferInputTensor(shape=[-1] * 5)
    tensor.contents.fp32_contents.extend([1.0] * 6)
    tensor.contents.fp64_contents.extend([1.0] * 7)
    tensor.contents.bool_contents.extend([True] * 8)
    message = kserve_pb2.ModelInferRequest(inputs=[tensor])
    assert count_all(message.SerializeToString(), plan_of(message.DESCRIPTOR)).num_numbers == 5 + 6 + 7 + 8


def test_a_message_without_a_prompt_is_small() -> None:
    plan = plan_of_method("/octavo.v1.Inference/Cancel")
    with pytest.raises(InvalidRequest, match=f"use at most {MAX_OTHER_BYTES} bytes"):
        count_all(pb.CancelRequest(request_id="x" * MAX_OTHER_BYTES).SerializeToString(), plan)
    count_all(pb.CancelRequest(request_id="x" * 100).SerializeToString(), plan)


def test_it_reads_what_the_parser_reads() -> None:
    """Messages that the parser takes have the elements that were counted, and the unknown fields."""
    random = Random(5)
    originals = [each.SerializeToString() for each in (*REQUESTS, CHAT, CHAT_WITH_JSON)]
    outcomes = set()
    for _ in range(3_000):
        message = change_bytes(random.choice(originals), random)
        try:
            parsed = pb.GenerateRequest.FromString(message)
        except DecodeError:
            continue
        try:
            count = count_all(message, GENERATE)
        except InvalidRequest as error:
            # The second: groups, which proto3 does not have.
            if "entries: use at most" not in str(error) and "wire type 3" not in str(error):
                raise
            continue
        outcomes.add("unknown" if count.unknown_bytes else "known")
        assert len(parsed.token_ids.ids) + len(parsed.sampling.stop_token_ids) <= count.num_fields + count.num_numbers
        plain = pb.GenerateRequest.FromString(message)
        plain.DiscardUnknownFields()
        assert bool(count.unknown_bytes) == (plain.ByteSize() != parsed.ByteSize()), message
    assert {"known", "unknown"} <= outcomes


def test_memory_that_fields_take_is_not_underestimated() -> None:
    # Chat messages are the largest: 120 bytes each, measured with 8 million.
    count = count_all(_in_chat(b"\x0a\x00" * 1_000), GENERATE)
    assert count.expanded_bytes >= 1_000 * 120
    assert elements.MAX_FIELDS * 128 < 2**24


def test_bodies_over_http_have_the_same_bounds() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    body = json.dumps({"model": "m", "messages": [{"role": "assistant", "tool_calls": [call] * 1_000}] * 17}).encode()
    with pytest.raises(BadRequestError, match="the message has more than 65536 fields"):
        parse_to_bytes("chat", body, "a", False, 0)
