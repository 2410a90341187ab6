"""Overload: which requests are refused, how soon, and with what message; a fake scheduler computes."""

import random
from pathlib import Path

import grpc
import httpx
import pytest

from benchmarks.router.offered_load import FINISHED, REFUSED, Outcomes, Sender, Shape, open_loop, retry_delay_of
from protos import inference_pb2 as pb
from router.api.gateway.app import Gateway
from router.errors import DeadlineExceeded
from router.server import RouterServer
from scheduler.core.messages import ANY_PRIORITY
from tests.fakes.routers import receive, running_router, running_schedulers, socket_address
from tests.fakes.scheduler import FakeScheduler

SHAPE = Shape(num_prompt_tokens=4, num_output_tokens=8)
FIELDS = {"model": "test-model", "prompt": [5, 6], "max_tokens": 3}


def request(*, priority: int = 0) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(max_tokens=4, ignore_eos=True)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6]), sampling=sampling, priority=priority)


async def refusal(call) -> tuple[str, float]:
    """The error's details, and the seconds after which to try again."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await receive(call)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    delay = retry_delay_of(caught.value)
    assert delay is not None, "a refusal without RetryInfo"
    return caught.value.details() or "", delay


async def http_refusal(server: RouterServer, **fields: object) -> httpx.Response:
    gateway = Gateway(server.intake, server.metrics.registry, server.readiness, max_body_bytes=100_000)
    transport = httpx.ASGITransport(gateway.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        return await client.post("/v1/completions", json=FIELDS | fields)


async def test_ten_times_too_much_leaves_what_can_be_done_and_refuses_the_rest_with_a_time(tmp_path: Path) -> None:
    fake = FakeScheduler(socket_address(tmp_path, "one"), capacity=4, step_seconds=0.005, refused_priority=ANY_PRIORITY)
    async with running_schedulers(fake), running_router([fake.address]) as (server, stub):
        await server.wait_ready()
        choose = random.Random(0)
        outcomes = await open_loop(Sender(stub, SHAPE, choose), 600, choose, warm_up=0.0, seconds=1.5)
        assert set(outcomes.ends) == {FINISHED, REFUSED}
        assert outcomes.ends[REFUSED] > outcomes.ends[FINISHED]
        assert outcomes.num_without_retry_info == 0
        assert 0.1 <= min(outcomes.retry_delays) < max(outcomes.retry_delays) <= 45.0
        assert server.num_streams == 0
        await fake.wait_until(lambda fake: fake.num_live == 0)
        after = Outcomes()
        await Sender(stub, SHAPE, choose).send(after)
        assert after.ends[FINISHED] == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_router_refuses_until_one_of_its_requests_has_ended(tmp_path: Path, stream: bool) -> None:
    fake = FakeScheduler(socket_address(tmp_path, "one"), pause_at=1)
    async with running_schedulers(fake), running_router([fake.address], max_streams=2) as (server, stub):
        await server.wait_ready()
        calls = [stub.Generate(request()) for _ in range(2)]
        for call in calls:
            await receive(call, until=lambda received: bool(received.token_ids))
        words, _ = await refusal(stub.Generate(request()))
        assert "max_streams=2" in words
        response = await http_refusal(server, stream=stream)
        assert response.status_code == httpx.codes.TOO_MANY_REQUESTS
        assert int(response.headers["Retry-After"]) >= 1
        assert response.json()["error"]["type"] == "rate_limit_error"
        calls[0].cancel()
        await fake.wait_until(lambda fake: fake.num_live == 1)
        await fake.resume_steps()
        assert (await receive(stub.Generate(request()))).finished is not None
        calls[1].cancel()


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_scheduler_refuses_is_a_status_over_http_too(tmp_path: Path, stream: bool) -> None:
    """The refusal comes after Started, the first message of a gRPC stream."""
    fake = FakeScheduler(socket_address(tmp_path, "one"), capacity=0)
    async with running_schedulers(fake), running_router([fake.address]) as (server, stub):
        await server.wait_ready()
        words, _ = await refusal(stub.Generate(request()))
        assert "QUEUE_FULL" in words
        response = await http_refusal(server, stream=stream)
        assert response.status_code == httpx.codes.TOO_MANY_REQUESTS
        assert int(response.headers["Retry-After"]) >= 1
        assert len(fake.submitted) == 2


async def test_what_every_queue_would_refuse_is_not_sent_and_what_is_more_urgent_is(tmp_path: Path) -> None:
    fakes = [FakeScheduler(socket_address(tmp_path, name), refused_priority=3) for name in ("one", "two")]
    async with running_schedulers(*fakes), running_router([fake.address for fake in fakes]) as (server, stub):
        await server.wait_ready()
        words, _ = await refusal(stub.Generate(request(priority=3)))
        assert "the queue of every replica is full" in words
        assert not fakes[0].submitted
        assert not fakes[1].submitted
        assert (await receive(stub.Generate(request(priority=2)))).finished is not None


async def test_a_replica_whose_queue_is_full_is_left_out_while_another_has_room(tmp_path: Path) -> None:
    fakes = [FakeScheduler(socket_address(tmp_path, name)) for name in ("one", "two")]
    fakes[0].refused_priority = ANY_PRIORITY
    async with (
        running_schedulers(*fakes),
        running_router([fake.address for fake in fakes], routing_policy="round_robin") as (server, stub),
    ):
        await server.wait_ready()
        for _ in range(4):
            assert (await receive(stub.Generate(request()))).finished is not None
        assert (len(fakes[0].submitted), len(fakes[1].submitted)) == (0, 4)


async def test_a_request_whose_deadline_has_passed_is_not_submitted(tmp_path: Path) -> None:
    """For example, if it waited too long for the tokenizer; gRPC may notice its own deadline later."""
    fake = FakeScheduler(socket_address(tmp_path, "one"))
    async with running_schedulers(fake), running_router([fake.address]) as (server, _):
        await server.wait_ready()
        message = request()
        message.request_id = "late"
        with pytest.raises(DeadlineExceeded):
            async with server.intake.open(message, seconds=0.0):
                pytest.fail("the request was begun")
        assert (server.num_streams, fake.submitted) == (0, [])
