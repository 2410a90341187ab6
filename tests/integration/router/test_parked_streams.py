"""Streams that have begun and that no replica takes: parked, not lost; new requests are refused meanwhile."""

import asyncio
import logging
from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from protos import inference_pb2 as pb
from router.errors import DeadlineExceeded
from router.server import RouterServer
from router.streams import placement
from tests.fakes.routers import Received, receive, running_router, running_schedulers, socket_address
from tests.fakes.scheduler import FakeScheduler

NUM_TOKENS = 24


def _request(request_id: str = "r", *, max_tokens: int = NUM_TOKENS) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(max_tokens=max_tokens, seed=7)
    return pb.GenerateRequest(prompt="Once upon a time", request_id=request_id, sampling=sampling)


def _fake(directory: Path, name: str = "a", **fields: object) -> FakeScheduler:
    return FakeScheduler(socket_address(directory, name), **fields)  # type: ignore[arg-type]


async def _undisturbed(directory: Path) -> Received:
    fake = _fake(directory, "undisturbed")
    async with running_schedulers(fake), running_router([fake.address]) as (server, stub):
        await server.wait_ready()
        return await receive(stub.Generate(_request()))


async def _begun(stub, request: pb.GenerateRequest, num_tokens: int) -> tuple[grpc.aio.Call, Received]:
    call = stub.Generate(request)
    return call, await receive(call, until=lambda r: len(r.token_ids.get(0, ())) == num_tokens)


def _num_parked(server: RouterServer) -> float | None:
    return server.metrics.registry.get_sample_value("octavo_router_held_streams")


async def _until_parked(server: RouterServer, count: int) -> None:
    async with asyncio.timeout(10):
        # A gauge can only be polled.
        while _num_parked(server) != count:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_streams_are_parked_until_a_replica_returns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    want = await _undisturbed(tmp_path)
    fake = _fake(tmp_path, pause_at=4)
    async with running_schedulers(fake), running_router([fake.address]) as (server, stub):
        await server.wait_ready()
        streams = [await _begun(stub, _request(f"r{i}"), 4) for i in range(3)]
        with caplog.at_level(logging.WARNING, "octavo.router"):
            await fake.kill()
            await _until_parked(server, 3)
        assert len([record for record in caplog.records if "are held" in record.message]) == 1
        assert server.num_streams == 3
        with pytest.raises(grpc.aio.AioRpcError, match=r"no replica is ready: .*a\.sock") as caught:
            await receive(stub.Generate(_request("new")))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert _retry_delay(caught.value) > 0
        # A parked stream can be cancelled like any live request.
        assert (await stub.Cancel(pb.CancelRequest(request_id="r0"))).cancelled
        assert _num_parked(server) == 2
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await receive(streams[0][0], into=streams[0][1])
        assert caught.value.code() is grpc.StatusCode.CANCELLED
        fake.pause_at = None
        await fake.start()
        for call, received in streams[1:]:
            await receive(call, into=received)
            assert (received.token_ids, received.text, received.finish) == (want.token_ids, want.text, want.finish)
            assert received.exact
        assert _num_parked(server) == 0


def _retry_delay(error: grpc.aio.AioRpcError) -> float:
    metadata = dict(error.trailing_metadata() or ())
    status, info = Status.FromString(metadata["grpc-status-details-bin"]), RetryInfo()  # type: ignore[arg-type]
    assert status.details[0].Unpack(info)
    return info.retry_delay.ToTimedelta().total_seconds()


async def test_a_parked_stream_ends_at_its_deadline(tmp_path: Path) -> None:
    """The router itself ends it: not every protocol that brings requests ends them at their deadline."""
    fake = _fake(tmp_path, pause_at=4)
    async with running_schedulers(fake), running_router([fake.address]) as (server, _):
        await server.wait_ready()
        async with asyncio.timeout(10), server.intake.open(_request(), 0.3) as stream:
            while stream.num_output_tokens < 4:
                await stream.outbox.take()
            await fake.kill()
            await _until_parked(server, 1)
            with pytest.raises(DeadlineExceeded):
                await stream.outbox.take()
        assert _num_parked(server) == 0


async def test_a_drain_of_the_router_ends_what_it_holds(tmp_path: Path) -> None:
    fake = _fake(tmp_path, pause_at=4)
    async with running_schedulers(fake), running_router([fake.address]) as (server, stub):
        await server.wait_ready()
        early, of_early = await _begun(stub, _request("early"), 4)
        await fake.kill()
        await _until_parked(server, 1)
        await server.drain()
        with pytest.raises(grpc.aio.AioRpcError, match="resume at another router") as caught:
            await receive(early, into=of_early)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_stream_that_other_queues_are_too_full_for_waits_for_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that has begun is not refused after its replica died."""
    monkeypatch.setattr(placement, "_TRY_AGAIN_S", 0.01)
    want = await _undisturbed(tmp_path)
    first, full = _fake(tmp_path, "a", pause_at=4), _fake(tmp_path, "b", capacity=0)
    async with running_schedulers(first, full), running_router([first.address, full.address]) as (server, stub):
        await server.wait_ready()
        # A new request goes to any replica that has room.
        call, received = await _begun(stub, _request(), 4)
        await first.kill()
        await full.wait_until(lambda fake: len(fake.submitted) > 3)
        full.capacity = None
        await receive(call, into=received)
    assert (received.token_ids, received.text) == (want.token_ids, want.text)
    # Refusals do not count as losses.
    assert {submit.attempt for submit in full.submitted[-3:]} == {1}


@pytest.mark.parametrize("progress", [True, False])
async def test_only_losses_without_a_token_in_between_end_a_stream(tmp_path: Path, progress: bool) -> None:
    """A request that kills its replicas must not be resubmitted for ever; one that had bad luck must not end."""
    fake = _fake(tmp_path, pause_at=1)
    async with running_schedulers(fake), running_router([fake.address]) as (server, stub):
        await server.wait_ready()
        call, received = await _begun(stub, _request(), 1)
        for i in range(20):
            fake.give_up_all()
            if progress:
                fake.pause_at = i + 2
            count = i + 2
            if count > 17 and not progress:
                with pytest.raises(grpc.aio.AioRpcError, match="17 replicas in a row lost this request") as caught:
                    await receive(call, into=received)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
                return
            await fake.wait_until(lambda fake, count=count: len(fake.submitted) == count)
            if progress:
                await receive(call, into=received, until=lambda r, count=count: len(r.token_ids[0]) == count)
        await fake.resume_steps()
        await receive(call, into=received)
    assert len(received.token_ids[0]) == NUM_TOKENS
