"""Replicas of two versions behind one router: requests get only to replicas that can do what they need."""

from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from protos import inference_pb2 as pb
from router.api.gateway.errors import body_of, http_status
from router.errors import MissingFeature
from tests.fakes.routers import Received, receive, running_router, running_schedulers, socket_address
from tests.fakes.scheduler import FakeScheduler

FEATURE = "allowed_token_ids"
NUM_TOKENS = 12


def _request(request_id: str, *, needs: bool) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(max_tokens=NUM_TOKENS, seed=7, allowed_token_ids=[5, 6] if needs else [])
    return pb.GenerateRequest(prompt="Once upon a time", request_id=request_id, sampling=sampling)


def _fakes(directory: Path, **fields: object) -> tuple[FakeScheduler, FakeScheduler]:
    """Returns a replica of an earlier version and one of this."""
    older = FakeScheduler(socket_address(directory, "older"), **fields)  # type: ignore[arg-type]
    newer = FakeScheduler(socket_address(directory, "newer"), features=[FEATURE], **fields)  # type: ignore[arg-type]
    return older, newer


def _asked(fake: FakeScheduler) -> set[str]:
    return {submit.request_id for submit in fake.submitted}


async def _begun(stub, request: pb.GenerateRequest) -> tuple[grpc.aio.Call, Received]:
    call = stub.Generate(request)
    return call, await receive(call, until=lambda received: len(received.token_ids.get(0, ())) == 4)


async def test_requests_that_need_a_feature_get_to_replicas_that_have_it(tmp_path: Path) -> None:
    older, newer = _fakes(tmp_path, pause_at=4)
    async with running_schedulers(older, newer), running_router([older.address, newer.address]) as (server, stub):
        await server.wait_ready()
        streams = [await _begun(stub, _request(f"new{i}", needs=True)) for i in range(6)]
        # The others go where there is less to do.
        streams += [await _begun(stub, _request(f"any{i}", needs=False)) for i in range(4)]
        await older.resume_steps()
        await newer.resume_steps()
        received = [await receive(call, into=begun) for call, begun in streams]
    assert all(each.finish[0].reason == pb.FINISH_REASON_LENGTH for each in received)
    assert _asked(newer) == {f"new{i}" for i in range(6)}
    assert _asked(older) == {f"any{i}" for i in range(4)}


async def test_a_bound_of_drafts_goes_to_every_replica(tmp_path: Path) -> None:
    """It changes no token: an older replica, which does not know the field, has no drafts to bound."""
    older, newer = _fakes(tmp_path)
    request = pb.GenerateRequest(prompt="Once upon a time", sampling=pb.SamplingParams(max_tokens=NUM_TOKENS, seed=7))
    request.sampling.num_speculative_tokens = 0
    async with running_schedulers(older, newer), running_router([older.address, newer.address]) as (server, stub):
        await server.wait_ready()
        received = [await receive(stub.Generate(request)) for _ in range(8)]
    assert len({tuple(each.token_ids[0]) for each in received}) == 1
    for fake in (older, newer):
        assert fake.submitted
        assert all(submit.sampling.HasField("num_speculative_tokens") for submit in fake.submitted)


async def test_streams_wait_for_a_replica_that_can_continue_them(tmp_path: Path) -> None:
    """The others go on at once, whether their replica drains or dies."""
    older, newer = _fakes(tmp_path, pause_at=4)
    async with running_schedulers(older, newer), running_router([older.address, newer.address]) as (server, stub):
        await server.wait_ready()
        streams = [await _begun(stub, _request(f"r{i}", needs=i < 3)) for i in range(6)]
        newer.draining = True
        newer.send_load()
        await newer.wait_until(lambda fake: fake.num_live == 3)
        await older.wait_until(lambda fake: fake.num_live == 3)
        await newer.kill()
        await older.resume_steps()
        for call, received in streams[3:]:
            await receive(call, into=received)
        with pytest.raises(grpc.aio.AioRpcError, match="no replica is ready") as caught:
            await receive(stub.Generate(_request("late", needs=True)))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert server.num_streams == 3
        newer.pause_at, newer.draining = None, False
        await newer.start()
        for call, received in streams[:3]:
            await receive(call, into=received)
            assert len(received.token_ids[0]) == NUM_TOKENS
            assert received.exact
    assert not _asked(older) & {"r0", "r1", "r2"}


async def test_more_logprobs_than_an_older_replica_returns(tmp_path: Path) -> None:
    older, newer = _fakes(tmp_path, pause_at=4)
    newer.max_logprobs = 64

    def asked(request_id: str, **counts: Any) -> pb.GenerateRequest:
        return pb.GenerateRequest(
            prompt="Once", request_id=request_id, sampling=pb.SamplingParams(max_tokens=NUM_TOKENS, **counts)
        )

    async with running_schedulers(older, newer), running_router([older.address, newer.address]) as (server, stub):
        await server.wait_ready()
        many = {
            f"{name}{i}": asked(f"{name}{i}", **{name: 64}) for name in ("logprobs", "prompt_logprobs") for i in (1, 2)
        }
        few = {f"few{i}": asked(f"few{i}", logprobs=20) for i in range(3)}
        streams = [await _begun(stub, each) for each in (*many.values(), *few.values())]
        await older.resume_steps()
        await newer.resume_steps()
        for call, received in streams:
            await receive(call, into=received)
        refused: list[tuple[dict[str, Any], str]] = [
            ({"logprobs": 65}, "sampling.logprobs=65: use 0 to 64"),
            ({"prompt_logprobs": 2**32 - 1}, "sampling.prompt_logprobs=-1 asks for all 49152 tokens"),
        ]
        for counts, words in refused:
            with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
                await receive(stub.Generate(asked("refused", **counts)))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert _asked(newer) == many.keys()
    assert _asked(older) == few.keys()


async def test_a_feature_that_no_replica_has_is_refused_by_name(tmp_path: Path) -> None:
    older, _ = _fakes(tmp_path)
    async with running_schedulers(older), running_router([older.address]) as (server, stub):
        await server.wait_ready()
        with pytest.raises(grpc.aio.AioRpcError, match=r"sampling\.allowed_token_ids is set: no replica") as caught:
            await receive(stub.Generate(_request("r", needs=True)))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        # Earlier workers fail at more than 20 logprobs.
        wide = pb.GenerateRequest(prompt="Once", beam_search=pb.BeamSearch(width=20))
        with pytest.raises(grpc.aio.AioRpcError, match=r"beam_search\.width is set: no replica") as search:
            await receive(stub.Generate(wide))
        assert search.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        await receive(stub.Generate(_request("r", needs=False)))
    assert len(older.submitted) == 1
    error = MissingFeature(caught.value.details())
    assert http_status(error) == 400
    assert body_of(error)["error"]["param"] == FEATURE
