"""Streams that live without a reader: another one attaches and gets every token once, whatever broke in between."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from protos import inference_pb2 as pb
from protos.inference_pb2_grpc import InferenceStub
from router.server import RouterServer
from tests.fakes.routers import Received, receive, running_router, running_schedulers, socket_address
from tests.fakes.scheduler import FakeScheduler


@pytest.fixture
async def scheduler(tmp_path: Path) -> AsyncIterator[FakeScheduler]:
    fake = FakeScheduler(socket_address(tmp_path, "one"))
    async with running_schedulers(fake):
        yield fake


@contextlib.asynccontextmanager
async def _router(*schedulers: FakeScheduler, **options: Any) -> AsyncIterator[tuple[RouterServer, Any]]:
    async with running_router([each.address for each in schedulers], **options) as (server, stub):
        await server.wait_ready()
        yield server, stub


def _asked(request_id: str = "a", *, seconds: float | None = 60.0, **sampling: Any) -> pb.GenerateRequest:
    params: dict[str, Any] = {"max_tokens": 40, "seed": 5, **sampling}
    return pb.GenerateRequest(
        request_id=request_id, prompt="Once upon", sampling=pb.SamplingParams(**params), detach_timeout=seconds
    )


def _attach(received: Received | None, request_id: str = "a") -> pb.AttachRequest:
    """Asks for what a client lacks that holds `received`."""
    asked = pb.AttachRequest(request_id=request_id)
    if received is None:
        return asked
    if received.prompt_logprobs:
        asked.prompt_logprobs_end = 1 + len(received.prompt_logprobs)
    for index, token_ids in received.token_ids.items():
        text_bytes = len(received.text[index].encode())
        asked.choices.add(
            index=index, num_tokens=len(token_ids), text_bytes=text_bytes, finished=index in received.finish
        )
    return asked


def _has(num_tokens: int) -> Any:
    return lambda received: sum(map(len, received.token_ids.values())) >= num_tokens


async def _read_part(call: Any, num_tokens: int, into: Received | None = None) -> Received:
    """Reads until the client holds so many tokens, and breaks the call."""
    received = await receive(call, until=_has(num_tokens), into=into)
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call.code()
    return received


async def _status(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        async for _ in call:
            pass
    return error.value.code(), error.value.details() or ""


async def test_a_client_goes_on_where_its_connection_broke(scheduler: FakeScheduler) -> None:
    asked: dict[str, Any] = {"n": 3, "logprobs": 1, "prompt_logprobs": 0}
    scheduler.likely = lambda token_ids: [(7, -0.5), (8, -1.5)]
    async with _router(scheduler) as (server, stub):
        whole = await receive(stub.Generate(_asked("whole", seconds=None, **asked)))
        assert len(server.held_streams) == 0, "a stream is held that nobody asked for"
        scheduler.step_seconds = 0.002
        received = await _read_part(stub.Generate(_asked(**asked)), 20)
        assert not received.finish
        for num_tokens in (21, 50, 90, 10_000):
            received.begin_again()
            call = stub.Attach(_attach(received))
            received = await _read_part(call, num_tokens, into=received)
    assert received.token_ids == whole.token_ids
    assert received.text == whole.text
    assert received.finish == whole.finish
    # Those of the three choices come in any order.
    for each in (received, whole):
        each.logprobs.sort(key=lambda entry: entry.SerializeToString())
    assert received.logprobs == whole.logprobs
    assert received.prompt_logprobs == whole.prompt_logprobs
    assert received.finished.usage == whole.finished.usage


async def test_a_request_goes_on_without_a_reader_and_gives_back_what_it_held(scheduler: FakeScheduler) -> None:
    scheduler.step_seconds = 0.001
    async with _router(scheduler) as (server, stub):
        await _read_part(stub.Generate(_asked(max_tokens=200)), 1)
        await server.streams.wait_empty()
        assert scheduler.num_live == 0
        assert not scheduler.cancelled, "it was cancelled when its reader left"
        sample = server.metrics.requests.labels("length")
        assert sample._value.get() == 1  # type: ignore[attr-defined]
        received = await receive(stub.Attach(pb.AttachRequest(request_id="a")))
        assert len(received.token_ids[0]) == 200
        assert received.finished.usage.completion_tokens == 200


async def test_the_time_without_a_reader_is_bounded(scheduler: FakeScheduler) -> None:
    scheduler.pause_at = 2
    async with _router(scheduler, detach_timeout=0.05) as (server, stub):
        await _read_part(stub.Generate(_asked(seconds=None)), 2)
        await scheduler.wait_until(lambda each: each.num_live == 0)
        assert (await _status(stub.Attach(_attach(None))))[0] is grpc.StatusCode.NOT_FOUND
        await server.streams.wait_empty()
        assert len(server.held_streams) == 0
        # Its own number holds, not the option's.
        await _read_part(stub.Generate(_asked("b", seconds=0.0)), 2)
        assert (await _status(stub.Attach(_attach(None, "b"))))[0] is grpc.StatusCode.NOT_FOUND


async def test_of_two_readers_the_later_one_has_the_stream(scheduler: FakeScheduler) -> None:
    scheduler.pause_at = 3
    async with _router(scheduler) as (_, stub):
        first = stub.Generate(_asked(max_tokens=6))
        received = await receive(first, until=_has(3))
        second = stub.Attach(pb.AttachRequest(request_id="a"))
        both = await receive(second, until=_has(3))
        assert both.token_ids == received.token_ids
        code, message = await _status(first)
        assert (code, message) == (grpc.StatusCode.ABORTED, "another reader has attached to this stream")
        scheduler.pause_at = None
        both = await receive(second, into=both)
        assert len(both.token_ids[0]) == 6


async def test_what_cannot_be_attached_to_is_refused_by_name(scheduler: FakeScheduler) -> None:
    scheduler.pause_at = 3
    async with _router(scheduler) as (_, stub):
        received = await _read_part(stub.Generate(_asked()), 3)
        code, message = await _status(stub.Attach(_attach(None, "unknown")))
        assert code is grpc.StatusCode.NOT_FOUND
        assert "request_id='unknown'" in message
        code, _ = await _status(stub.Attach(pb.AttachRequest()))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        received.token_ids[0].append(1)
        code, message = await _status(stub.Attach(_attach(received)))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "4 tokens" in message
        for seconds in (-1.0, 3601.0, float("nan")):
            code, message = await _status(stub.Generate(_asked("b", seconds=seconds)))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert message.startswith("detach_timeout=")
        # A live stream that was not to be held.
        live = stub.Generate(_asked("c", seconds=None))
        await receive(live, until=_has(3))
        assert (await _status(stub.Attach(_attach(None, "c"))))[0] is grpc.StatusCode.NOT_FOUND
        assert (await _status(stub.Generate(_asked("a"))))[0] is grpc.StatusCode.ALREADY_EXISTS
    async with _router(scheduler, max_detached_streams=0) as (_, stub):
        code, message = await _status(stub.Generate(_asked("d")))
        assert (code, "max_detached_streams=0" in message) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_cancel_ends_a_stream_without_a_reader_and_a_resume_takes_it_over(scheduler: FakeScheduler) -> None:
    scheduler.pause_at = 3
    async with _router(scheduler) as (_, stub):
        await _read_part(stub.Generate(_asked()), 3)
        assert (await stub.Cancel(pb.CancelRequest(request_id="a"))).cancelled
        assert (await _status(stub.Attach(_attach(None))))[0] is grpc.StatusCode.CANCELLED
        received = await _read_part(stub.Generate(_asked("b", max_tokens=6)), 3)
        resume = received.resume_request()
        resume.detach_timeout = 60
        received.begin_again()
        scheduler.pause_at = 5
        received = await _read_part(stub.Generate(resume), 5, into=received)
        received.begin_again()
        scheduler.pause_at = None
        received = await receive(stub.Attach(_attach(received, "b")), into=received)
        assert received.started.attempt == 1
        assert len(received.token_ids[0]) == 6


async def test_a_tenant_may_have_so_many_without_a_reader(scheduler: FakeScheduler) -> None:
    """Those that have been read to their end make way; a running one does not end for the sake of another."""
    scheduler.pause_at = 3
    async with _router(scheduler, max_detached_streams=2) as (server, stub):
        await receive(stub.Generate(_asked("read", max_tokens=2)))
        await _read_part(stub.Generate(_asked("one")), 3)
        await _read_part(stub.Generate(_asked("two")), 3)
        await _read_part(stub.Generate(_asked("three")), 3)
        await scheduler.wait_until(lambda each: each.num_live == 2)
        gauge: Any = server.metrics.detached_streams
        assert gauge._value.get() == 2
        for request_id, is_held in (("read", False), ("one", True), ("two", True), ("three", False)):
            assert (server.held_streams.find(request_id) is not None) == is_held, request_id
        attached = await _read_part(stub.Attach(_attach(None, "one")), 3)
        assert len(attached.token_ids[0]) == 3


async def test_output_that_nobody_reads_is_bounded(scheduler: FakeScheduler) -> None:
    """A stream whose unread output reaches half of stream_buffer_bytes ends, and can be resumed."""
    scheduler.likely = lambda token_ids: [(token, -1.0) for token in range(20)]
    async with _router(scheduler, stream_buffer_bytes=65_536) as (server, stub):
        received = await _read_part(stub.Generate(_asked(max_tokens=1500, logprobs=20)), 1)
        await server.streams.wait_empty()
        call = stub.Attach(_attach(received))
        received.begin_again()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await receive(call, into=received)
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert 0 < len(received.token_ids[0]) < 1500
        resume = received.resume_request()
        received.begin_again()
        received = await receive(stub.Generate(resume), into=received)
        assert len(received.token_ids[0]) == 1500


async def test_a_draining_router_lets_it_finish_and_one_that_stops_says_that_it_can_be_resumed(
    scheduler: FakeScheduler,
) -> None:
    scheduler.pause_at = 3
    async with _router(scheduler, drain_timeout=30) as (server, stub):
        await _read_part(stub.Generate(_asked(max_tokens=6)), 3)
        reader = stub.Attach(_attach(None))
        received = await receive(reader, until=_has(3))
        draining = asyncio.create_task(server.drain())
        scheduler.pause_at = None
        received = await receive(reader, into=received)
        assert len(received.token_ids[0]) == 6
        await draining
    scheduler.pause_at = 3
    async with _router(scheduler) as (server, stub):
        await _read_part(stub.Generate(_asked("b")), 3)
        reader = stub.Attach(_attach(None, "b"))
        received = await receive(reader, until=_has(3))
        await server.stop()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await receive(reader, into=received)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_cut_at_random_while_replicas_die_every_output_is_whole(tmp_path: Path) -> None:
    draw = random.Random(7)
    fakes = [FakeScheduler(socket_address(tmp_path, name), step_seconds=0.002) for name in ("one", "two")]
    async with running_schedulers(*fakes), _router(*fakes) as (server, stub):
        begun = asyncio.Barrier(51)

        async def one(number: int) -> Received:
            asked = _asked(str(number), max_tokens=60, seed=number, n=1 + number % 2)
            received = await _read_part(stub.Generate(asked), draw.randrange(1, 30))
            await begun.wait()
            while received.finished is None:
                await asyncio.sleep(draw.random() / 50)
                received.begin_again()
                call = stub.Attach(_attach(received, str(number)))
                received = await _read_part(call, draw.randrange(1, 140), into=received)
            return received

        streams = [asyncio.create_task(one(number)) for number in range(50)]
        await begun.wait()
        for fake in fakes * 2:
            # Others may have ended meanwhile.
            if fake.num_live:
                await fake.kill()
                await fake.start()
            await asyncio.sleep(0.05)
        outputs = [await stream for stream in streams]
        for fake in fakes:
            fake.step_seconds = 0
        for number, output in enumerate(outputs):
            asked = _asked(f"again-{number}", seconds=None, max_tokens=60, seed=number, n=1 + number % 2)
            whole = await receive(stub.Generate(asked))
            assert output.token_ids == whole.token_ids
            assert output.text == whole.text
        assert server.metrics.resubmissions._value.get() > 0  # type: ignore[attr-defined]


async def test_the_deadline_of_a_call_is_the_readers(scheduler: FakeScheduler) -> None:
    scheduler.pause_at = 3
    async with _router(scheduler) as (_, stub):
        call = stub.Generate(_asked(max_tokens=6), timeout=0.3)
        code, _ = await _status(call)
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        scheduler.pause_at = None
        received = await receive(stub.Attach(_attach(None)))
        assert len(received.token_ids[0]) == 6


async def test_a_unary_request_can_be_read_afterwards(scheduler: FakeScheduler) -> None:
    scheduler.pause_at = 3
    async with _router(scheduler) as (_, stub):
        call = stub.GenerateUnary(_asked(max_tokens=6))
        await scheduler.wait_until(lambda each: each.num_live == 1)
        call.cancel()
        scheduler.pause_at = None
        received = await receive(stub.Attach(_attach(None)))
        assert len(received.token_ids[0]) == 6


async def test_another_keys_stream_is_not_found(scheduler: FakeScheduler, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.touch(mode=0o600)
    keys.write_text("keys:\n  - {name: t, key: a-long-enough-key}\n  - {name: u, key: another-long-key}\n")
    own, foreign = (("authorization", f"Bearer {key}") for key in ("a-long-enough-key", "another-long-key"))
    scheduler.pause_at = 3
    async with _router(scheduler, api_keys_file=str(keys)) as (_, stub):
        await _read_part(stub.Generate(_asked(), metadata=[own]), 3)
        code, _ = await _status(stub.Attach(_attach(None), metadata=[foreign]))
        assert code is grpc.StatusCode.NOT_FOUND
        received = await _read_part(stub.Attach(_attach(None), metadata=[own]), 3)
        assert len(received.token_ids[0]) == 3


async def test_the_memory_of_a_thousand_is_bounded_and_given_back(scheduler: FakeScheduler) -> None:
    async with _router(scheduler, max_detached_streams=1000, stream_buffer_bytes=4096) as (server, stub):

        async def one(number: int) -> None:
            await _read_part(stub.Generate(_asked(str(number), max_tokens=30, logprobs=0)), 1)

        for begin in range(0, 1000, 100):
            await asyncio.gather(*(one(number) for number in range(begin, begin + 100)))
        await server.streams.wait_empty()
        assert len(server.held_streams) == 1000
        held = [server.held_streams.find(str(number)) for number in range(1000)]
        assert all(each is not None and each.transcript.num_bytes <= 2048 + 600 for each in held)
        await server.held_streams.stop()
        assert len(server.held_streams) == 0
        gauge: Any = server.metrics.detached_streams
        assert gauge._value.get() == 0


def test_stubs_know_the_call() -> None:
    assert hasattr(InferenceStub(grpc.insecure_channel("127.0.0.1:1")), "Attach")
