"""A router with API keys, over gRPC and HTTP; a fake scheduler computes."""

import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import openai
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.router.offered_load import retry_delay_of
from protos import admin_pb2, admin_pb2_grpc
from protos import inference_pb2 as pb
from router.api.gateway.app import Gateway
from router.api.gateway.server import GatewayServer
from router.server import RouterServer
from tests.fakes.routers import receive, running_router, running_schedulers, socket_address
from tests.fakes.scheduler import FakeScheduler

ALICE, BOB, CAROL = "alice-0123456789abcdef", "bob-0123456789abcdef", "carol-0123456789abcdef"


def _as(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


def _request(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt="Hello", sampling=pb.SamplingParams(max_tokens=5, seed=1), **fields)


async def _read_to_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
        pass


@pytest.fixture
async def scheduler(tmp_path: Path) -> AsyncIterator[FakeScheduler]:
    fake = FakeScheduler(socket_address(tmp_path, "one"))
    async with running_schedulers(fake):
        yield fake


@pytest.fixture
async def router(scheduler: FakeScheduler, tmp_path: Path) -> AsyncIterator[tuple[RouterServer, Any]]:
    path = tmp_path / "keys.yaml"
    path.write_text(
        f"keys:\n- {{name: alice, key: {ALICE}, admin: true}}\n- {{name: bob, key: {BOB}, priority: 3}}\n"
        f"- {{name: carol, key: {CAROL}, requests_per_minute: 1}}\n"
    )
    path.chmod(0o600)
    async with running_router([scheduler.address], api_keys_file=str(path)) as (server, stub):
        await server.wait_ready()
        yield server, stub


async def test_without_a_key_only_health_answers(router: tuple[RouterServer, Any]) -> None:
    server, stub = router
    for metadata in ((), _as("wrong")):
        for call in (
            receive(stub.Generate(_request(), metadata=metadata)),
            stub.GetModel(pb.GetModelRequest(), metadata=metadata),
            stub.Cancel(pb.CancelRequest(request_id="x"), metadata=metadata),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
    assert (await receive(stub.Generate(_request(), metadata=_as(ALICE)))).finished is not None
    assert (await receive(stub.Generate(_request(), metadata=(("x-api-key", BOB),)))).finished is not None


async def test_a_tenant_reaches_no_request_and_no_block_of_another(
    router: tuple[RouterServer, Any], scheduler: FakeScheduler
) -> None:
    server, stub = router
    scheduler.pause_at = 1
    calls = {key: stub.Generate(_request(request_id="same", cache_salt="s"), metadata=_as(key)) for key in (ALICE, BOB)}
    started = {key: (await call.read()).started for key, call in calls.items()}
    # Both are live under the same request id.
    assert len(server.streams) == 2
    assert {message.request_id for message in started.values()} == {"same"}
    await scheduler.wait_until(lambda fake: len(fake.submitted) == 2)
    submits = {submit.request_id: submit for submit in scheduler.submitted}
    assert set(submits) == {"alice/same", "bob/same"}
    salts = {submit.cache_salt for submit in submits.values()}
    assert len(salts) == 2
    assert "s" not in salts
    assert {name: submit.priority for name, submit in submits.items()} == {"alice/same": 0, "bob/same": 3}

    cancel = pb.CancelRequest(request_id="same")
    assert not (await stub.Cancel(cancel, metadata=_as(CAROL))).cancelled
    # A resume with another tenant's key is a new request of that tenant.
    resume = pb.Resume(attempt=1, prompt_token_ids=started[ALICE].prompt_token_ids)
    other = stub.Generate(
        pb.GenerateRequest(request_id="same", sampling=started[ALICE].sampling, resume=resume), metadata=_as(CAROL)
    )
    assert (await other.read()).HasField("started")
    assert len(server.streams) == 3
    other.cancel()
    assert (await stub.Cancel(cancel, metadata=_as(ALICE))).cancelled
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _read_to_end(calls[ALICE])
    assert caught.value.code() is grpc.StatusCode.CANCELLED
    assert not calls[BOB].done()
    calls[BOB].cancel()


async def test_a_used_up_key_is_told_when_to_come_again(router: tuple[RouterServer, Any]) -> None:
    _, stub = router
    await receive(stub.Generate(_request(), metadata=_as(CAROL)))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await receive(stub.Generate(_request(), metadata=_as(CAROL)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    status = Status.FromString(dict(caught.value.trailing_metadata())["grpc-status-details-bin"])  # type: ignore[arg-type]
    info = RetryInfo()
    assert status.details[0].Unpack(info)
    assert status.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    assert 50 < info.retry_delay.seconds <= 60
    await receive(stub.Generate(_request(), metadata=_as(BOB)))


@pytest.mark.parametrize("call", ["Tokenize", "Detokenize"])
async def test_tokenizing_counts_as_a_request(router: tuple[RouterServer, Any], call: str) -> None:
    _, stub = router
    messages = {"Tokenize": pb.TokenizeRequest(prompt="x"), "Detokenize": pb.DetokenizeRequest(token_ids=[5])}
    await getattr(stub, call)(messages[call], metadata=_as(CAROL))
    with pytest.raises(grpc.aio.AioRpcError, match="requests_per_minute=1") as caught:
        await getattr(stub, call)(messages[call], metadata=_as(CAROL))
    assert 50 < (retry_delay_of(caught.value) or 0) <= 60


async def test_only_an_admin_resets_what_all_share(router: tuple[RouterServer, Any]) -> None:
    server, _ = router
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        admin: Any = admin_pb2_grpc.AdminStub(channel)
        codes = []
        for key in (BOB, ALICE):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await admin.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest(), metadata=_as(key))
            codes.append(caught.value.code())
    # The fake scheduler has no such service, so an allowed call fails with UNAVAILABLE.
    assert codes == [grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAVAILABLE]


async def test_over_http_and_no_key_is_logged(
    router: tuple[RouterServer, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server, _ = router
    gateway = Gateway(
        server.intake, server.metrics.registry, server.readiness, max_body_bytes=100_000, keys=server.keys
    )
    listening = GatewayServer(gateway, "127.0.0.1", 0)
    listening.start()
    url = f"http://127.0.0.1:{listening.port}"
    asked: dict[str, Any] = {"model": "test-model", "prompt": "Once upon", "max_tokens": 4}
    try:
        async with httpx.AsyncClient(base_url=url) as http:
            refused = await http.post("/v1/completions", json=asked, headers={"Authorization": f"Bearer {ALICE}no"})
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == "Bearer"
            assert refused.json()["error"]["code"] == "invalid_api_key"
            assert (await http.get("/v1/models")).status_code == 401
            assert [(await http.get(path)).status_code for path in ("/health", "/metrics")] == [200, 401]
            keys = [{"Authorization": f"Bearer {key}"} for key in (BOB, ALICE)]
            statuses = [(await http.get("/metrics", headers=each)).status_code for each in keys]
            assert statuses == [403, 200]
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=CAROL, max_retries=0) as client:
            assert (await client.completions.create(**asked)).choices[0].text
            with pytest.raises(openai.RateLimitError) as caught:
                await client.completions.create(**asked)
            assert 50 < int(caught.value.response.headers["retry-after"]) <= 60
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.completions.create(**asked)
    finally:
        await listening.stop()
    # Only Octavo's loggers: the client's libraries may log what they send.
    ours = "\n".join(record.getMessage() for record in caplog.records if record.name.startswith("octavo"))
    assert not any(key in ours for key in (ALICE, BOB, CAROL))
