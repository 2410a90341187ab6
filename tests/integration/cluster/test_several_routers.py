"""Several routers over the same schedulers, and several processes of one router at the same port."""

import asyncio
import contextlib
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import httpx
import pytest

from configs.options import Options
from octavo import AsyncClient, Client, Delta, SamplingParams
from octavo.cluster.errors import ClusterError
from octavo.cluster.ports import claimed_ports, resolve_ports
from protos import inference_pb2 as pb
from protos.inference_pb2_grpc import InferenceStub
from router.api.gateway.app import Gateway
from router.api.gateway.server import GatewayServer
from router.errors import AddressError
from router.server import ProcessIndex, RouterServer
from tests.fakes.routers import Received, receive, running_router, running_schedulers, smollm2_tokenizer, socket_address
from tests.fakes.scheduler import FakeScheduler
from tests.support.ports import free_port
from tests.support.repository import ROOT
from tests.support.up import Up, environment

SHARING = [ProcessIndex(process=process, shares_ports=True) for process in range(2)]
GRPC = re.compile(r"^gRPC +(\S+)$", re.MULTILINE)
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]


def test_routers_have_addresses_and_processes_and_one_goes_on_where_another_was_killed(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    flags = ("--num-routers=2", "--api-server-count=2", "--port=0")
    with Up(tmp_path, *flags, FAKE_JOURNAL=str(journal)) as up:
        up.wait_until_serving(num_processes=6)
        first, second = GRPC.findall(up.output)
        assert int(second.rpartition(":")[2]) == int(first.rpartition(":")[2]) + 1 > 1
        assert f"octavo chat --target {first},{second}" in up.output
        with Client([first, second]) as client:
            assert client.chat("Capital of France?").text == "Paris, of course"
            # The stopped launcher does not start it again.
            up.process.send_signal(signal.SIGSTOP)
            for process in up.children_of("router"):
                if process.cmdline()[-4:-1] == ["--router", "0", "--process"]:
                    process.kill()
            assert client.chat("Capital of France?").text == "Paris, of course"
            up.process.send_signal(signal.SIGCONT)
        for process in range(2):
            up.wait_for(f"router 0.{process} was killed by SIGKILL; starting it again")
        up.wait_for("router 0 max_num_seqs=", count=4)
        up.interrupt()
        assert up.wait() == 0
    assert journal.read_text().split() == [*["router"] * 4, "scheduler", "worker"]


@pytest.fixture
async def scheduler(tmp_path: Path) -> AsyncIterator[FakeScheduler]:
    fake = FakeScheduler(socket_address(tmp_path, "one"), pause_at=3)
    async with running_schedulers(fake):
        yield fake


def options_of(scheduler: FakeScheduler) -> Options:
    return Options(port=free_port(), metrics_port=0, scheduler_addresses=(scheduler.address,), api_server_count=2)


@contextlib.asynccontextmanager
async def routers_of(options: Options, *indexes: ProcessIndex) -> AsyncIterator[list[RouterServer]]:
    """Routers in this process, which may also share a port with itself."""
    servers = [RouterServer(options, smollm2_tokenizer(), "test-model", index) for index in indexes]
    try:
        for server in servers:
            await server.start()
            await server.wait_ready()
        yield servers
    finally:
        for server in servers:
            await server.stop()


class Caller:
    """A client with its own connection."""

    def __init__(self, target: str) -> None:
        self._channel = grpc.aio.insecure_channel(target, options=OWN_CONNECTION)
        self._streams: list[tuple[grpc.aio.UnaryStreamCall, Received]] = []

    async def begin(self) -> None:
        """Opens a stream of eight tokens and reads the first; tries again if refused, as clients do."""
        request = pb.GenerateRequest(prompt="Hello", sampling=pb.SamplingParams(max_tokens=8, ignore_eos=True))
        while True:
            call = InferenceStub(self._channel).Generate(request)
            try:
                received = await receive(call, until=lambda received: bool(received.token_ids))
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                await asyncio.sleep(0.5)  # RetryInfo says 1 s
                continue
            self._streams.append((call, received))
            return

    async def finish(self) -> None:
        for call, received in self._streams:
            await receive(call, into=received)
            assert len(received.token_ids[0]) == 8
            assert received.finished is not None
        await self._channel.close()


async def test_connections_are_dealt_out_and_a_process_that_drains_leaves_its_own_to_the_others(
    scheduler: FakeScheduler,
) -> None:
    options = options_of(scheduler)
    async with routers_of(options, *SHARING) as servers:
        callers: list[Caller] = []
        while len(callers) < 8 or not all(server.num_streams for server in servers):
            callers.append(Caller(f"127.0.0.1:{options.port}"))
            await callers[-1].begin()
        first, second = servers
        num_before = first.num_streams
        drain = asyncio.create_task(first.drain())
        async with asyncio.timeout(20):
            while not first.intake.draining:  # noqa: ASYNC110 (there is no event to wait for)
                await asyncio.sleep(0)
        # Over the same channels, half of which were connected to the draining process.
        await asyncio.gather(*(caller.begin() for caller in callers))
        assert (first.num_streams, second.num_streams) == (num_before, 2 * len(callers) - num_before)
        await scheduler.resume_steps()
        await asyncio.gather(*(caller.finish() for caller in callers))
        async with asyncio.timeout(20):
            await drain


async def test_clients_of_a_router_that_drains_find_the_next_one_behind_the_same_name(scheduler: FakeScheduler) -> None:
    """As in Kubernetes, where a Service's address stands for several routers."""
    async with running_router([scheduler.address]) as (first, _), running_router([scheduler.address]) as (second, _):
        await first.wait_ready()
        await second.wait_ready()
        caller = Caller(f"ipv4:127.0.0.1:{first.port},127.0.0.1:{second.port}")
        await caller.begin()
        assert (first.num_streams, second.num_streams) == (1, 0)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(first.drain())
            while not first.intake.draining:  # noqa: ASYNC110 (there is no event to wait for)
                await asyncio.sleep(0)
            await caller.begin()
            assert (first.num_streams, second.num_streams) == (1, 1)
            await scheduler.resume_steps()
            await caller.finish()


async def test_http_connections_move_on_when_a_process_drains(scheduler: FakeScheduler) -> None:
    # Only for HTTP: gRPC has another port.
    port = free_port()
    async with routers_of(options_of(scheduler), *SHARING) as servers:
        gateways: list[GatewayServer] = []
        try:
            for server in servers:
                app = Gateway(server.intake, server.metrics.registry, server.readiness, max_body_bytes=4096)
                gateways.append(GatewayServer(app, "127.0.0.1", port, shares_port=True))
                gateways[-1].start()
            scheduler.pause_at = None
            body = {"prompt": "Hello", "max_tokens": 4}
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
                assert (await client.post("/v1/completions", json=body)).status_code == 200
                (served,) = [i for i, server in enumerate(servers) if num_requests(server)]
                gateways[served].leave()
                for _ in range(3):
                    await asyncio.sleep(0)  # a transport closes in the next turn of the loop
                # The same client: a connection that stayed open would lead to the same process.
                for _ in range(8):
                    assert (await client.post("/v1/completions", json=body)).status_code == 200
            assert [num_requests(server) for server in servers] == [1 + 7 * served, 8 - 7 * served]
        finally:
            for gateway in gateways:
                await gateway.stop()


def num_requests(server: RouterServer) -> int:
    return int(server.metrics.registry.get_sample_value("octavo_requests_total", {"outcome": "length"}) or 0)


async def test_no_stranger_shares_a_port_silently(scheduler: FakeScheduler) -> None:
    options = options_of(scheduler)
    async with routers_of(options, *SHARING):
        stranger = RouterServer(options, smollm2_tokenizer(), "test-model")
        with pytest.raises(AddressError, match=f"port={options.port}: Address already in use"):
            await stranger.start()
        # Another cluster's routers would share the port, so it is refused, too.
        with pytest.raises(ClusterError, match=f"port={options.port}: port {options.port} of 127.0.0.1 is in use"):
            resolve_ports(options.model_copy(update={"http_port": 0}))


def test_a_cluster_that_starts_at_the_same_time_is_refused() -> None:
    port = free_port()
    options = Options(port=port, http_port=0, api_server_count=2)
    with claimed_ports(options):
        refusal = pytest.raises(ClusterError, match=f"port {port} is shared by the routers of another `octavo up`")
        with refusal, claimed_ports(options):
            pass
        with claimed_ports(Options(port=port, http_port=0)), socket.create_server(("127.0.0.1", port)):
            pass  # a port that is not shared needs no claim: bind tells whether it is free
    with claimed_ports(options):
        pass


async def test_a_client_of_a_killed_process_goes_on_at_another_one_of_the_same_port(scheduler: FakeScheduler) -> None:
    options = options_of(scheduler)
    flags = (f"--port={options.port}", "--http-port=0", "--metrics-port=0", "--served-model-name=test-model")
    addresses = (f"--scheduler-addresses={scheduler.address}", "--api-server-count=2")
    killed = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router", "--process=1", *flags, *addresses), cwd=ROOT, env=environment()
    )
    try:
        async with asyncio.timeout(60), AsyncClient(f"127.0.0.1:{options.port}") as client:
            await scheduler.wait_until(lambda fake: len(fake.routers) == 1)
            stream = client.stream("Hello", SamplingParams(max_tokens=8, ignore_eos=True))
            while not isinstance(await anext(stream), Delta):
                pass
            async with routers_of(options, SHARING[0]):
                killed.kill()
                await killed.wait()
                await scheduler.resume_steps()
                async for _ in stream:
                    pass
        assert len(stream.generation.choices[0].token_ids) == 8
        assert len(scheduler.submitted) == 2
    finally:
        if killed.returncode is None:
            killed.kill()
            await killed.wait()


@pytest.mark.parametrize("is_found", [True, False])
async def test_cancel_reaches_a_stream_through_any_router(tmp_path: Path, is_found: bool) -> None:
    """Also one that other routers do not find, such as an older one: its replica tells it."""
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700 if is_found else 0o755)
    replicas = [FakeScheduler(socket_address(tmp_path, name), pause_at=3) for name in ("one", "two")]
    addresses = [replica.address for replica in replicas]
    async with (
        running_schedulers(*replicas),
        running_router(addresses, runtime_dir=directory) as (server, stub),
        running_router(addresses, runtime_dir=tmp_path / "other") as (other, stub_of_other),
    ):
        await server.wait_ready()
        await other.wait_ready()
        sampling = pb.SamplingParams(n=2, max_tokens=8, ignore_eos=True)
        call = stub.Generate(pb.GenerateRequest(prompt="Hello", sampling=sampling, request_id="mine"))
        received = await receive(call, until=lambda received: bool(received.token_ids))
        assert not (await stub_of_other.Cancel(pb.CancelRequest(request_id="another"))).cancelled
        assert (await stub_of_other.Cancel(pb.CancelRequest(request_id="mine"))).cancelled
        message = "for this request$" if is_found else "through another router"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await receive(call, into=received)
        assert caught.value.code() is grpc.StatusCode.CANCELLED
        assert re.search(message, caught.value.details() or "")
        # No router has it any more, and it did not move to the other replica.
        assert not (await stub_of_other.Cancel(pb.CancelRequest(request_id="mine"))).cancelled
        assert sum(len(replica.submitted) for replica in replicas) == 1


async def test_cancel_of_what_nobody_can_be_asked_for_is_no_answer(tmp_path: Path) -> None:
    async with running_router([socket_address(tmp_path, "nobody")]) as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError, match="no replica answers") as caught:
            await stub.Cancel(pb.CancelRequest(request_id="mine"))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
