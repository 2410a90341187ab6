"""The router's gRPC server (Inference, Admin, health, reflection): how it starts, drains and stops."""

import asyncio
import logging
import math
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from configs.options import Options
from protos.admin_pb2_grpc import add_AdminServicer_to_server
from protos.inference_pb2 import DESCRIPTOR
from protos.inference_pb2_grpc import add_InferenceServicer_to_server
from router.api import admin_service as admin
from router.api.inference_service import InferenceService
from router.api.observer import Observer
from router.api.open_streams import OpenStreams
from router.api.operator import Operator
from router.api.peer_server import PeerServer
from router.api.receiving import Receiving
from router.errors import AddressError
from router.intake.admission import Admission
from router.intake.attach.attachments import Attachments
from router.intake.attach.held_streams import HeldStreams
from router.intake.constraints import Constraints, compilers
from router.intake.intake import Intake
from router.intake.live import LiveRequests
from router.intake.media.fetching import Fetcher
from router.intake.media.items import Items
from router.intake.media.store import ItemStore
from router.intake.new_streams import NewStreams
from router.intake.served import RouterText, ServedModel
from router.replicas.health.pace import PaceSettings
from router.replicas.peers import Peers
from router.replicas.policies import POLICIES
from router.replicas.replica import ReplicaOptions
from router.replicas.replica_set import ReplicaSet
from router.request.media.limits import MediaLimits
from router.request.outputs import Outputs
from router.security.authentication import KeyInterceptor
from router.security.keys import Keys
from router.security.shared_limits import SharedLimits
from router.streams.migrations import Migrations
from router.streams.placement import Dispatcher
from router.streams.registry import StreamRegistry
from router.streams.whole_answers import WholeAnswers
from router.telemetry.call_context import TraceInterceptor
from router.telemetry.metrics import RouterMetrics, vllm_names
from router.telemetry.requests import RequestTelemetry
from router.text.tokenizer import Tokenizer
from router.text.tokenizer_pool import TokenizerPool
from runtime.grpc_setup.server import ANSWERS_PINGS, add_reflection, is_loopback, why_not_bound
from runtime.process import most_connections
from runtime.security.renewal import Renewed
from runtime.security.tls import TlsFiles, add_port
from runtime.telemetry.metrics import exposed
from runtime.telemetry.tracing import Tracing


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIndex:
    """Index of a router among num_routers, and of one of its api_server_count processes. shares_ports: the process
    shares the router's ports with the others; False: its ports are its own."""

    router: int = 0
    process: int = 0
    shares_ports: bool = False

    def __str__(self) -> str:
        return f"{self.router}.{self.process}" if self.shares_ports else str(self.router)


ONLY_PROCESS = ProcessIndex()


log = logging.getLogger("octavo.router")

SERVICE = DESCRIPTOR.services_by_name["Inference"].full_name
_SERVING, _NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
# Time that ended streams get to tell their clients.
_LAST_WORDS_S = 1.0
# Time after which a connection without calls ends.
_IDLE_MS = 600_000
# Time for which a draining process refuses calls before it closes its port.
_REFUSING_S = 0.25


class RouterServer:
    """One router, or one of its processes. Liveness ("") is SERVING while it runs, readiness (octavo.v1.Inference, and
    the services of option compat) while a replica is ready."""

    def __init__(
        self, options: Options, tokenizer: Tokenizer, model_name: str, index: ProcessIndex = ONLY_PROCESS
    ) -> None:
        """Raises KeysError, TlsError, TracingError."""
        self.metrics = RouterMetrics()
        # What /metrics shows.
        self.registry = exposed(
            options.metrics_names, self.metrics.registry, vllm_names(self.metrics.registry, model_name)
        )
        self.port = 0
        # None: anyone may call.
        self.keys = Keys(Path(options.api_keys_file).expanduser()) if options.api_keys_file else None
        self._options = options
        self._wanted_port = options.router_port(index.router)
        self._shares_ports = index.shares_ports
        self._tokenizer = TokenizerPool(tokenizer, options.max_tokenizing_bytes)
        make_compiler = compilers(tokenizer.directory, options.constraint_compile_timeout)
        self._constraints = Constraints(make_compiler, self.metrics)
        scheduler_credentials = _scheduler_credentials(options)
        self._replicas = ReplicaSet(
            [options.scheduler_address(i) for i in range(options.data_parallel_size)],
            POLICIES[options.routing_policy](),
            ReplicaOptions(
                router_id=f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}",
                model_name=model_name,
                silence_timeout=options.heartbeat_timeout,
                stall_timeout=options.replica_stall_timeout,
                credentials=scheduler_credentials,
                peer_address=self._own_address,
                runtime_dir=options.runtime_dir,
            ),
            self.metrics,
            PaceSettings(
                slow_factor=options.slow_replica_factor,
                handover_factor=options.slow_replica_handover_factor,
                max_share=options.slow_replica_max_share,
                window=options.slow_replica_window,
            ),
        )
        self._replicas.subscribe(self._on_replicas_change)
        self.tls = _tls_files(options)
        endpoint = options.otlp_traces_endpoint
        # None: requests are not traced.
        self._tracing = Tracing.open(endpoint, f"router-{index}") if endpoint else None
        self.streams = StreamRegistry(self.metrics)
        dispatcher = Dispatcher(self._replicas, self.metrics)
        self._items = Items(
            MediaLimits.of(options),
            ItemStore(math.floor(options.item_memory * 2**30)),
            Fetcher(options.allowed_media_domains, options.media_fetch_timeout),
        )
        self.metrics.item_bytes.set_function(lambda: self._items.store.num_bytes)
        self._peers = Peers(self._replicas.replicas, self._own_address, scheduler_credentials)
        migrations = Migrations(self._replicas, dispatcher, self.metrics)
        live = LiveRequests(self.streams, migrations, self._replicas.replicas, self._peers)
        self.intake = Intake(
            ServedModel(model_name, self._replicas),
            RouterText(
                encoder=self._tokenizer,
                outputs=Outputs(tokenizer, options.tool_call_parser, options.reasoning_parser),
                constraints=self._constraints,
                trusts_templates=options.trust_request_chat_template,
            ),
            self._items,
            admission=Admission(self._replicas, options.max_streams, options.max_streams_per_key),
            streams=NewStreams(self.streams, dispatcher, self.metrics, buffer_bytes=options.stream_buffer_bytes),
            live=live,
            answers=WholeAnswers(options.max_answers_bytes),
            telemetry=RequestTelemetry(self.metrics, self._tracing, log_requests=options.enable_log_requests),
        )
        self.held_streams = HeldStreams(options.max_detached_streams, self.metrics.detached_streams)
        self.attachments = Attachments(
            self.intake,
            self.held_streams,
            detach_timeout=options.detach_timeout,
            buffer_bytes=options.stream_buffer_bytes,
            peers=self._peers,
        )
        self._peer_server = PeerServer(
            self.attachments, options.runtime_dir, options.peer_host, _peer_credentials(options)
        )
        self.operator = Operator(self._replicas.replicas, live)
        self.observer = Observer(model_name, self._replicas, self.streams, self.metrics)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        # Services whose health status is the router's readiness.
        self._ready_names: tuple[str, ...] = (SERVICE,)
        self._health_updates: set[asyncio.Task[None]] = set()
        self._server: grpc.aio.Server | None = None
        # Set once it runs, if there are keys.
        self._counting: asyncio.Task[None] | None = None
        # Set once the router drains.
        self._leaving: asyncio.Task[None] | None = None

    def _own_address(self) -> str:
        """Where other routers reach this process; empty: nowhere."""
        return self._peer_server.address

    @property
    def num_streams(self) -> int:
        return len(self.streams)

    async def wait_ready(self) -> None:
        """Waits until every replica is ready."""
        await self._replicas.all_ready.wait()

    def readiness(self) -> tuple[bool, str]:
        """Returns what /health shows: True if requests are served, and a line on the replicas. Safe from any thread."""
        if self.intake.draining:
            return False, "draining"
        return self._replicas.num_ready > 0, self._replicas.describe()

    async def start(self) -> None:
        """Listens, and connects to the schedulers in the background. Raises AddressError, MissingPackageError,
        TlsError."""
        options = self._options
        server = grpc.aio.server(
            interceptors=self._interceptors(),
            options=[
                # Two routers on one port would silently share its connections; only processes of one router may.
                ("grpc.so_reuseport", int(self._shares_ports)),
                ("grpc.max_receive_message_length", options.max_message_bytes),
                ("grpc.max_send_message_length", -1),
                # A message that nobody has asked for yet gets 64 KiB of room: measured windows grew to many times that.
                ("grpc.http2.bdp_probe", 0),
                # By default, beyond 1,000 pending calls, gRPC ends some with CANCELLED, which no client retries.
                ("grpc.server.max_pending_requests", options.max_streams),
                ("grpc.server.max_pending_requests_hard_limit", 2 * options.max_streams),
                # Connections that nobody uses end, and clients make a new one at their next call.
                ("grpc.max_allowed_incoming_connections", most_connections(options.max_connections)),
                ("grpc.server_handshake_timeout_ms", 20_000),
                ("grpc.max_connection_idle_ms", _IDLE_MS),
                ANSWERS_PINGS,
                ("grpc.keepalive_permit_without_calls", 1),
                # If a client's host vanishes, its blocks are freed after the first and one of the other times.
                ("grpc.keepalive_time_ms", 30_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.ping_timeout_ms", 10_000),
            ],
        )
        add_InferenceServicer_to_server(InferenceService(self.intake, self.attachments), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        add_AdminServicer_to_server(admin.AdminService(self.operator, self.observer), server)
        if options.compat:
            # Other projects' services: a router without them imports nothing of theirs.
            from router.compat import add_services

            foreign = add_services(options.compat, server, self.intake, self._replicas, options)
            self._ready_names = (SERVICE, *foreign)
        add_reflection(server, *self._ready_names, admin.SERVICE)
        await self._set_readiness(_NOT_SERVING)
        host = f"[{options.host}]" if ":" in options.host else options.host
        credentials = None if self.tls is None else self.tls.server_credentials()
        try:
            self.port = add_port(server, f"{host}:{self._wanted_port}", credentials)
        except RuntimeError:
            cause = why_not_bound(options.host, self._wanted_port)
            raise AddressError(
                f"can't listen on host={options.host!r}, port={self._wanted_port}: {cause}; choose another port, or 0 "
                "for any free one"
            ) from None
        self._warn_of_open_addresses()
        self._server = server
        await server.start()
        await self._peer_server.start()
        self._replicas.start()
        if self.keys is not None:
            self._counting = asyncio.create_task(SharedLimits(self.keys, self._replicas.replicas).run())

    async def drain(self, leave_http: Callable[[], None] | None = None) -> None:
        """Refuses new requests, and waits for the running ones, at most drain_timeout seconds.

        Closes the port and tells connected clients to connect again: they reach another process at the port, or another
        router behind the same name. leave_http: closes the HTTP port.
        """
        self.intake.drain()
        await self._set_readiness(_NOT_SERVING)
        # Closing drops calls that gRPC has not handed over yet; a refusal instead tells clients that they may retry.
        await asyncio.sleep(_REFUSING_S)
        if leave_http is not None:
            leave_http()
        self._leave_port()
        log.info("draining: %d streams get %g s to finish", self.num_streams, self._options.drain_timeout)
        try:
            async with asyncio.timeout(self._options.drain_timeout):
                await self.streams.wait_empty()
        except TimeoutError:
            log.warning(
                "drain_timeout=%g s has passed: %d streams end now", self._options.drain_timeout, self.num_streams
            )

    def _leave_port(self) -> None:
        assert self._server is not None
        # After the grace period gRPC cancels what is left; by then `stop` has told streams that they may be resumed.
        grace = self._options.drain_timeout + 2 * _LAST_WORDS_S
        self._leaving = asyncio.create_task(self._server.stop(grace))

    async def stop(self) -> None:
        """Ends the streams that still run, which clients may resume, and closes."""
        self.intake.stop()
        if self._server is not None:
            await self._server.stop(_LAST_WORDS_S)
        if self._leaving is not None:
            await self._leaving
        await self.held_streams.stop()
        await self._peer_server.stop()
        if self._counting is not None:
            self._counting.cancel()
            await asyncio.gather(self._counting, return_exceptions=True)
        await self._replicas.stop()
        await self._peers.stop()
        self._tokenizer.close()
        self._constraints.close()
        await self._items.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    @property
    def is_tracing(self) -> bool:
        return self._tracing is not None

    def _interceptors(self) -> list[grpc.aio.ServerInterceptor]:
        tracing = [TraceInterceptor()] if self.is_tracing else []
        keys = [] if self.keys is None else [KeyInterceptor(self.keys)]
        options = self._options
        receiving = Receiving(max_message_bytes=options.max_message_bytes, max_total_bytes=options.max_bodies_bytes)
        return [*tracing, *keys, receiving, OpenStreams()]

    def _on_replicas_change(self, replicas: ReplicaSet) -> None:
        serving = replicas.num_ready > 0 and not self.intake.draining
        task = asyncio.ensure_future(self._set_readiness(_SERVING if serving else _NOT_SERVING))
        self._health_updates.add(task)
        task.add_done_callback(self._health_updates.discard)

    async def _set_readiness(self, status: int) -> None:
        for name in self._ready_names:
            await self._health.set(name, status)

    def _warn_of_open_addresses(self) -> None:
        options = self._options
        if options.peer_host and not is_loopback(options.peer_host) and not options.scheduler_tls_dir:
            log.warning("peer_host=%s: routers reach each other without TLS; use a private network", options.peer_host)
        if not is_loopback(options.host):
            if self.keys is None and not options.tls_client_ca_file:
                log.warning("host=%s: anyone who reaches port %d can use this server", options.host, self.port)
            if self.tls is None:
                log.warning("host=%s: port %d has no TLS; use a private network", options.host, self.port)
        if options.scheduler_tls_dir:
            return
        for replica in self._replicas.replicas:
            host = replica.address.rpartition(":")[0]
            if not replica.address.startswith(("unix:", "file:")) and not is_loopback(host):
                log.warning("scheduler_addresses: %s is reached without TLS; use a private network", replica.address)


def _tls_files(options: Options) -> TlsFiles | None:
    if not options.tls_cert_file:
        return None
    ca = options.tls_client_ca_file
    return TlsFiles(
        option="tls_cert_file, tls_key_file, tls_client_ca_file",
        cert=Path(options.tls_cert_file).expanduser(),
        key=Path(options.tls_key_file).expanduser(),
        ca=Path(ca).expanduser() if ca else None,
    )


def _peer_credentials(options: Options) -> Callable[[], grpc.ServerCredentials] | None:
    """Returns what a server shows to other routers, which show theirs; None: no TLS. Raises TlsError."""
    if not options.scheduler_tls_dir:
        return None
    return TlsFiles.of_directory("scheduler_tls_dir", options.scheduler_tls_dir).server_credentials


def _scheduler_credentials(options: Options) -> Callable[[], grpc.ChannelCredentials] | None:
    """Returns a function that gives the credentials now in the files; None: no TLS. Raises TlsError."""
    if not options.scheduler_tls_dir:
        return None
    files = TlsFiles.of_directory("scheduler_tls_dir", options.scheduler_tls_dir)
    return Renewed(files.paths, files.channel_credentials).current
