"""TLS between clients and router, and between router and scheduler; the openssl command line makes certificates."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from typer.testing import CliRunner

from configs.options import Options
from octavo.cli.main import app
from octavo.client.async_client import AsyncClient
from octavo.client.connection import tls_credentials
from octavo.client.errors import AccessDenied, Unavailable
from octavo.client.requests import SamplingParams
from router.api.gateway.app import Gateway
from router.api.gateway.server import GatewayServer
from router.server import RouterServer
from runtime.security.tls import TlsError, TlsFiles
from scheduler.server import SchedulerServer
from tests.fakes.routers import running_router, running_schedulers, socket_address
from tests.fakes.scheduler import FakeScheduler
from tests.support.certificates import Authority
from tests.support.ports import free_port

KEY = "alice-0123456789abcdef"
GREEDY = SamplingParams(max_tokens=4, temperature=0)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "foreign")


@pytest.fixture
async def scheduler(tmp_path: Path) -> AsyncIterator[FakeScheduler]:
    fake = FakeScheduler(socket_address(tmp_path, "one"))
    async with running_schedulers(fake):
        yield fake


def _server_options(authority: Authority) -> dict[str, Any]:
    certificate, key = authority.sign("router")
    return {"tls_cert_file": str(certificate), "tls_key_file": str(key)}


async def test_our_client_speaks_tls_and_brings_its_key(
    scheduler: FakeScheduler, ours: Authority, foreign: Authority, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"keys: [{{name: alice, key: {KEY}}}]")
    keys.chmod(0o600)
    options = _server_options(ours)
    async with running_router([scheduler.address], api_keys_file=str(keys), **options) as (server, _):
        await server.wait_ready()
        target = f"127.0.0.1:{server.port}"
        good = tls_credentials(ours.ca)
        async with AsyncClient(target, credentials=good, api_key=KEY) as client:
            assert (await client.generate("Hello", GREEDY)).choices[0].token_ids
        async with AsyncClient(target, credentials=good, retry_for=0) as client:
            with pytest.raises(AccessDenied):
                await client.generate("Hello", GREEDY)
        for credentials in (tls_credentials(foreign.ca), None):
            async with AsyncClient(target, credentials=credentials, api_key=KEY, retry_for=0) as client:
                with pytest.raises(Unavailable):
                    await client.generate("Hello", GREEDY)


async def test_the_command_line_speaks_tls_and_brings_its_key(
    scheduler: FakeScheduler, ours: Authority, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"keys: [{{name: alice, key: {KEY}}}]")
    keys.chmod(0o600)
    async with running_router([scheduler.address], api_keys_file=str(keys), **_server_options(ours)) as (server, _):
        await server.wait_ready()
        arguments = ["complete", "Hello", "--target", f"127.0.0.1:{server.port}", "--tls-ca", str(ours.ca)]
        run = CliRunner().invoke
        done = await asyncio.to_thread(run, app, arguments, env={"OCTAVO_API_KEY": KEY})
        assert (done.exit_code, "output tokens" in done.stderr) == (0, True), done.output
        refused = await asyncio.to_thread(run, app, arguments)
        assert isinstance(refused.exception, AccessDenied)


async def test_with_a_client_ca_only_who_has_its_certificate_gets_in(
    scheduler: FakeScheduler, ours: Authority, foreign: Authority
) -> None:
    options: dict[str, Any] = _server_options(ours) | {"tls_client_ca_file": str(ours.ca)}
    async with running_router([scheduler.address], **options) as (server, _):
        await server.wait_ready()
        target = f"127.0.0.1:{server.port}"
        async with AsyncClient(target, credentials=tls_credentials(ours.ca, *ours.sign("client"))) as client:
            assert (await client.generate("Hello", GREEDY)).choices[0].token_ids
        for credentials in (tls_credentials(ours.ca), tls_credentials(ours.ca, *foreign.sign("client"))):
            async with AsyncClient(target, credentials=credentials, retry_for=0) as client:
                with pytest.raises(Unavailable):
                    await client.generate("Hello", GREEDY)
        await _ask_over_https(server, ours)


async def _ask_over_https(server: RouterServer, ours: Authority) -> None:
    gateway = Gateway(server.intake, server.metrics.registry, server.readiness, max_body_bytes=100_000)
    listening = GatewayServer(gateway, "127.0.0.1", 0, server.tls)
    listening.start()
    url = f"https://127.0.0.1:{listening.port}/v1/models"
    trusting = ssl.create_default_context(cafile=str(ours.ca))
    try:
        async with httpx.AsyncClient(verify=trusting) as http:
            with pytest.raises((httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError)):
                await http.get(url)
        trusting.load_cert_chain(*ours.sign("http"))
        async with httpx.AsyncClient(verify=trusting) as http:
            assert (await http.get(url)).json()["data"][0]["id"] == "test-model"
    finally:
        await listening.stop()


def _directory(path: Path, authority: Authority, name: str) -> str:
    path.mkdir()
    certificate, key = authority.sign(name)
    for source, target in ((certificate, "tls.crt"), (key, "tls.key"), (authority.ca, "ca.crt")):
        (path / target).write_bytes(source.read_bytes())
    return str(path)


async def test_router_and_scheduler_know_each_other_by_certificates(
    ours: Authority, foreign: Authority, tmp_path: Path
) -> None:
    address = f"127.0.0.1:{free_port()}"
    given: dict[str, Any] = {"runtime_dir": tmp_path / "run", "metrics_port": 0, "scheduler_addresses": [address]}
    server = SchedulerServer(Options(**given, scheduler_tls_dir=_directory(tmp_path / "s", ours, "scheduler")), 0)
    await server.start()
    try:
        trusted = TlsFiles.of_directory("scheduler_tls_dir", _directory(tmp_path / "r", ours, "router"))
        stranger = TlsFiles.of_directory("scheduler_tls_dir", _directory(tmp_path / "x", foreign, "router"))
        health = "/grpc.health.v1.Health/Check"
        async with grpc.aio.secure_channel(address, trusted.channel_credentials()) as channel:
            assert await channel.unary_unary(health)(b"", timeout=10) == b"\x08\x01"
        by_ca_only = grpc.ssl_channel_credentials(ours.ca.read_bytes())
        for credentials in (stranger.channel_credentials(), by_ca_only):
            async with grpc.aio.secure_channel(address, credentials) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channel.unary_unary(health)(b"", timeout=10)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        await server.stop()


async def test_a_session_over_tls_is_a_session(ours: Authority, tmp_path: Path) -> None:
    directory = TlsFiles.of_directory("scheduler_tls_dir", _directory(tmp_path / "both", ours, "both"))
    fake = FakeScheduler(f"127.0.0.1:{free_port()}", credentials=directory.server_credentials())
    async with (
        running_schedulers(fake),
        running_router([fake.address], scheduler_tls_dir=str(tmp_path / "both")) as (server, _),
    ):
        await server.wait_ready()
        async with AsyncClient(f"127.0.0.1:{server.port}") as client:
            assert (await client.generate("Hello", GREEDY)).choices[0].token_ids


async def test_a_router_shows_its_renewed_certificate_when_it_connects_again(
    ours: Authority, foreign: Authority, tmp_path: Path
) -> None:
    """Its first certificate is refused, as an expired one would be, until the files are replaced."""
    at_scheduler = TlsFiles.of_directory("scheduler_tls_dir", _directory(tmp_path / "s", ours, "scheduler"))
    at_router = tmp_path / "r"
    _directory(at_router, foreign, "router")
    (at_router / "ca.crt").write_bytes(ours.ca.read_bytes())
    fake = FakeScheduler(f"127.0.0.1:{free_port()}", credentials=at_scheduler.server_credentials())
    async with (
        running_schedulers(fake),
        running_router([fake.address], scheduler_tls_dir=str(at_router)) as (server, _),
    ):
        assert not server.readiness()[0]
        certificate, key = ours.sign("renewed-router")
        (at_router / "tls.key").write_bytes(key.read_bytes())
        (at_router / "tls.crt").write_bytes(certificate.read_bytes())
        async with asyncio.timeout(30):
            await server.wait_ready()


def test_files_that_do_not_fit_are_named(ours: Authority, tmp_path: Path) -> None:
    certificate, key = ours.sign("a")
    _, other = ours.sign("b")
    for cert, secret, says in (
        (certificate, other, "KEY_VALUES_MISMATCH"),
        (tmp_path / "none", key, "No such file"),
        (key, key, "PEM"),
    ):
        with pytest.raises(TlsError, match=says):
            TlsFiles(option="tls_cert_file", cert=cert, key=secret, ca=None).server_credentials()
    with pytest.raises(TlsError, match="tls_client"):
        TlsFiles(option="tls_client_ca_file", cert=certificate, key=key, ca=key).check()
    with pytest.raises(ValueError, match="tls_key_file"):
        Options(tls_cert_file="a")
    with pytest.raises(ValueError, match="tls_client_ca_file"):
        Options(tls_client_ca_file="a")


def _shown_at(port: int, trusted: Authority) -> str:
    """The common name in the certificate that a TLS server on this machine shows."""
    context = ssl.create_default_context(cafile=str(trusted.ca))
    # As gRPC's own clients do.
    context.set_alpn_protocols(["h2", "http/1.1"])
    with (
        socket.create_connection(("127.0.0.1", port), 10) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        certificate: Any = connection.getpeercert()
    return dict(pair for part in certificate["subject"] for pair in part)["commonName"]


async def test_a_renewed_certificate_is_shown_to_the_next_client_and_open_streams_go_on(
    scheduler: FakeScheduler, ours: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    certificate, key = ours.sign("first")
    options: dict[str, Any] = {"tls_cert_file": str(certificate), "tls_key_file": str(key)}
    scheduler.pause_at = 2
    async with running_router([scheduler.address], **options) as (server, _):
        await server.wait_ready()
        gateway = Gateway(server.intake, server.metrics.registry, server.readiness, max_body_bytes=100_000)
        listening = GatewayServer(gateway, "127.0.0.1", 0, server.tls)
        listening.start()
        ports = server.port, listening.port
        try:
            async with AsyncClient(f"127.0.0.1:{server.port}", credentials=tls_credentials(ours.ca)) as client:
                stream = client.stream("Hello", GREEDY)
                await anext(stream)
                renewed, renewed_key = ours.sign("renewed")
                # The two files are not replaced at once: in between, key and certificate do not match.
                certificate.write_bytes(renewed.read_bytes())
                assert [await asyncio.to_thread(_shown_at, port, ours) for port in ports] == ["first", "first"]
                assert sum("stays in force" in record.getMessage() for record in caplog.records) == 2
                key.write_bytes(renewed_key.read_bytes())
                assert [await asyncio.to_thread(_shown_at, port, ours) for port in ports] == ["renewed", "renewed"]
                await scheduler.resume_steps()
                async for _ in stream:
                    pass
                assert len(stream.generation.choices[0].token_ids) == GREEDY.max_tokens
        finally:
            await listening.stop()
