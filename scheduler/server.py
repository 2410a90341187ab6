"""The scheduler's gRPC side: Sessions with routers, health and reflection; and the start and stop of a scheduler."""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from configs.options import Options
from protos import inference_pb2, scheduler_pb2
from protos.admin_pb2_grpc import add_AdminServicer_to_server
from runtime.grpc_setup.server import ANSWERS_PINGS, add_reflection
from runtime.security.tls import TlsFiles, add_port
from runtime.telemetry.tracing import Tracing
from runtime.wire import PROTOCOL_VERSION, RESUBMISSION_BITS, SESSION_MESSAGE_BYTES
from scheduler import admin
from scheduler.sessions import commands
from scheduler.sessions.outgoing import SESSION_BUFFER_BYTES, Outgoing, Parcel
from scheduler.sessions.rate_counts import RateCounts
from scheduler.sessions.submissions import Intake, ProtocolError
from scheduler.sockets import AddressClaims, AddressError, is_private, path_of, why_not_listening
from scheduler.step_loop.step_loop import StepLoop

log = logging.getLogger("octavo.scheduler")

SERVICE = scheduler_pb2.DESCRIPTOR.services_by_name["Scheduler"].full_name
_SERVING, _NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
# Characters of a router's address; longer ones are cut, and reach nobody.
_LONGEST_ADDRESS = 512
# Time for a Session's first message.
_OPEN_S = 10.0
# Time for the last messages to leave.
_LAST_WORDS_S = 1.0
# Time for the step loop's thread to end. A step of it takes milliseconds, unless it hangs on a disk or in a library.
_STEP_LOOP_END_S = 10.0


class SchedulerServer:
    """One scheduler. Liveness ("") is SERVING while it runs, readiness (octavo.v1.Scheduler) while its workers are
    ready."""

    def __init__(self, options: Options, replica: int, *, session_buffer_bytes: int = SESSION_BUFFER_BYTES) -> None:
        """Raises TracingError."""
        self.address = options.scheduler_address(replica)
        self._options, self._replica = options, replica
        self._session_buffer_bytes = session_buffer_bytes
        self._mailbox = commands.Mailbox()
        endpoint = options.otlp_traces_endpoint
        # None: requests are not traced.
        self._tracing = Tracing.open(endpoint, f"scheduler-{replica}") if endpoint else None
        self.step_loop = StepLoop(options, replica, self._mailbox, self, self._tracing)
        self._model: inference_pb2.ModelInfo | None = None
        self._outgoing: dict[int, Outgoing] = {}
        # Where the routers of open Sessions answer each other.
        self._peer_addresses: dict[int, str] = {}
        self._has_workers = False
        # Routers whose Session has ended without workers.
        self._waiting_routers: set[str] = set()
        self._session_numbers = itertools.count(1)
        # Counted on the event loop: no step needs it.
        self._rate_counts = RateCounts()
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._health_updates: set[asyncio.Task[None]] = set()
        self._is_draining = False

    async def start(self) -> None:
        """Listens for workers and routers. Raises AddressError, CurveError, TlsError or RecordingError."""
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[str | None] = self._loop.create_future()
        self._claims = AddressClaims(self._options, self._replica)
        try:
            self._server = self._make_server()
            await self._health.set(SERVICE, _NOT_SERVING)
            await asyncio.to_thread(self.step_loop.start_bound)
        except BaseException:
            self._claims.release()
            raise
        await self._server.start()
        if not is_private(self.address) and not self._options.scheduler_tls_dir:
            log.warning(
                "scheduler_addresses: %s is open to other hosts and has no TLS; use a private network", self.address
            )

    async def wait(self) -> str | None:
        """Waits for the end of the step loop. Returns the cause of its failure; None if it was asked to end."""
        return await asyncio.shield(self._over)

    def drain(self) -> None:
        """Takes no more requests, and ends when the running ones have ended or drain_timeout has passed."""
        self._is_draining = True
        self._set_readiness(False)
        self._mailbox.put(commands.Drain())

    async def stop(self) -> None:
        """Ends at once and closes everything."""
        self._set_readiness(False)
        self._mailbox.put(commands.Stop())
        await asyncio.to_thread(self.step_loop.join, _STEP_LOOP_END_S)
        if self.step_loop.is_alive():
            log.error("the step loop has not ended within %g s: this process ends without it", _STEP_LOOP_END_S)
        for outgoing in self._outgoing.values():
            outgoing.close()
        await self._server.stop(_LAST_WORDS_S)
        self._mailbox.close()
        self._claims.release()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    # --- Called on the step loop's thread; must not block

    def deliver(self, batch: list[tuple[int, list[Parcel]]]) -> None:
        """Delivers messages to routers, by Session."""
        self._loop.call_soon_threadsafe(self._deliver, batch)

    def workers_changed(self, model: inference_pb2.ModelInfo | None) -> None:
        """Takes the served model when the workers are ready; None when they are lost."""
        self._loop.call_soon_threadsafe(self._note_workers, model)

    def ended(self, cause: str | None) -> None:
        """Takes that the step loop has ended. cause: why it failed; None if it was asked to end."""
        self._loop.call_soon_threadsafe(self._over.set_result, cause)

    # --- On the event loop

    def _deliver(self, batch: list[tuple[int, list[Parcel]]]) -> None:
        for session, parcels in batch:
            outgoing = self._outgoing.get(session)
            if outgoing is not None:
                outgoing.put(parcels)

    def _note_workers(self, model: inference_pb2.ModelInfo | None) -> None:
        self._has_workers = model is not None
        if model is not None:
            self._model = model
            self._waiting_routers.clear()
        self._set_readiness(model is not None and not self._is_draining)

    def _set_readiness(self, is_ready: bool) -> None:
        task = asyncio.ensure_future(self._health.set(SERVICE, _SERVING if is_ready else _NOT_SERVING))
        self._health_updates.add(task)
        task.add_done_callback(self._health_updates.discard)

    def _make_server(self) -> grpc.aio.Server:
        directory = self._options.scheduler_tls_dir
        credentials = None
        if directory:
            credentials = TlsFiles.of_directory("scheduler_tls_dir", directory).server_credentials()
        server = grpc.aio.server(
            options=[
                # With it on, two schedulers on one port would silently split the routers.
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", SESSION_MESSAGE_BYTES),
                ("grpc.max_send_message_length", SESSION_MESSAGE_BYTES),
                ANSWERS_PINGS,
                ("grpc.keepalive_permit_without_calls", 1),
                # If a router's host vanishes, its blocks are freed after the first and one of the other times.
                ("grpc.keepalive_time_ms", 20_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.ping_timeout_ms", 10_000),
            ]
        )
        # No serializer: messages come serialized from the step loop.
        session = grpc.stream_stream_rpc_method_handler(
            self._session, request_deserializer=scheduler_pb2.RouterMessage.FromString
        )
        cancel = grpc.unary_unary_rpc_method_handler(
            self._cancel,
            request_deserializer=inference_pb2.CancelRequest.FromString,
            response_serializer=inference_pb2.CancelResponse.SerializeToString,
        )
        routers = grpc.unary_unary_rpc_method_handler(
            self._routers,
            request_deserializer=scheduler_pb2.RoutersRequest.FromString,
            response_serializer=scheduler_pb2.RoutersResponse.SerializeToString,
        )
        pause = grpc.unary_unary_rpc_method_handler(
            self._pause,
            request_deserializer=scheduler_pb2.PauseRequest.FromString,
            response_serializer=scheduler_pb2.PauseResponse.SerializeToString,
        )
        count = grpc.unary_unary_rpc_method_handler(
            self._count,
            request_deserializer=scheduler_pb2.CountRequest.FromString,
            response_serializer=scheduler_pb2.CountResponse.SerializeToString,
        )
        handlers = {"Session": session, "Cancel": cancel, "Routers": routers, "Pause": pause, "Count": count}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        metrics = self.step_loop.metrics
        own_admin = admin.AdminService(
            self._replica, self._mailbox.put, step_seconds=metrics.step_duration, lag=metrics.lag
        )
        add_AdminServicer_to_server(own_admin, server)
        add_reflection(server, SERVICE, admin.SERVICE)
        try:
            add_port(server, self.address, credentials)
        except RuntimeError:
            raise AddressError(why_not_listening(self.address)) from None
        if (path := path_of(self.address)) is not None:
            path.chmod(0o600)
        return server

    async def _session(
        self, requests: AsyncIterator[scheduler_pb2.RouterMessage], context: grpc.aio.ServicerContext
    ) -> None:
        first = None
        try:
            async with asyncio.timeout(_OPEN_S):
                first = await anext(aiter(requests), None)
        except TimeoutError:
            await context.abort(
                grpc.StatusCode.DEADLINE_EXCEEDED, f"message: no open has come within {_OPEN_S:g} s of the call"
            )
        if first is None or first.WhichOneof("message") != "open":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "message: a Session begins with open")
            return
        if first.open.protocol_version != PROTOCOL_VERSION:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"protocol_version is {first.open.protocol_version} at the router but {PROTOCOL_VERSION} at the "
                f"scheduler: install the same Octavo",
            )
        session, router = next(self._session_numbers), first.open.router_id[:128]
        outgoing = self._outgoing[session] = Outgoing(self._session_buffer_bytes)
        if first.open.peer_address:
            self._peer_addresses[session] = first.open.peer_address[:_LONGEST_ADDRESS]
        self._mailbox.put(commands.OpenSession(session=session, watch_cache=first.open.watch_cache))
        # A router opens another one every few seconds while it waits for the workers: the log says it once.
        level = logging.DEBUG if router in self._waiting_routers else logging.INFO
        log.log(level, "router %s has opened Session %d", router, session)
        reader = asyncio.ensure_future(self._read(session, requests))
        writer = asyncio.ensure_future(_write(outgoing, context))
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._outgoing[session]
            self._peer_addresses.pop(session, None)
            self._mailbox.put(commands.CloseSession(session=session))
            if not self._has_workers:
                self._waiting_routers.add(router)
            level = logging.INFO if self._has_workers else logging.DEBUG
            log.log(level, "Session %d with router %s has ended", session, router)
            for task in (reader, writer):
                task.cancel()
            errors = await asyncio.gather(reader, writer, return_exceptions=True)
        await _end(context, outgoing, errors[0])

    async def _cancel(
        self, request: inference_pb2.CancelRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.CancelResponse:
        order = commands.CancelRequest(request_id=request.request_id)
        self._mailbox.put(order)
        attempt = await admin.answer_of(order.answer, context)
        return inference_pb2.CancelResponse(cancelled=attempt is not None, attempt=(attempt or 0) >> RESUBMISSION_BITS)

    async def _routers(
        self, request: scheduler_pb2.RoutersRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.RoutersResponse:
        return scheduler_pb2.RoutersResponse(
            peer_addresses=sorted(set(self._peer_addresses.values())),
            num_without_address=len(self._outgoing) - len(self._peer_addresses),
        )

    async def _count(
        self, request: scheduler_pb2.CountRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.CountResponse:
        return self._rate_counts.count(request)

    async def _pause(
        self, request: scheduler_pb2.PauseRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.PauseResponse:
        if request.mode not in scheduler_pb2.PauseMode.values():
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"mode={request.mode}: it must be one of {', '.join(scheduler_pb2.PauseMode.keys())}",
            )
        if request.mode == scheduler_pb2.PAUSE_MODE_KEEP and self._options.in_lockstep:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                "mode=PAUSE_MODE_KEEP: replicas with enable_expert_parallel compute their steps together, and can't be "
                "frozen one by one; use PAUSE_MODE_WAIT or PAUSE_MODE_ABORT",
            )
        order = commands.Pause(mode=request.mode, clear_cache=request.clear_cache)
        self._mailbox.put(order)
        # No limit but the caller's: requests may take long to finish.
        return scheduler_pb2.PauseResponse(mode=await asyncio.wrap_future(order.answer))

    async def _read(self, session: int, requests: AsyncIterator[scheduler_pb2.RouterMessage]) -> None:
        """Reads until the router closes its side. Raises ProtocolError."""
        with ExitStack() as stack:
            intake: Intake | None = None
            async for message in requests:
                if intake is None:
                    if self._model is None:
                        raise ProtocolError(f"{message.WhichOneof('message')}: it came before the Welcome")
                    intake = Intake(
                        session,
                        self._model,
                        max_unsent_tokens=self._options.max_queued_tokens,
                        item_memory=self.step_loop.item_memory,
                    )
                    stack.callback(intake.close)
                for command in intake.receive(message, time.monotonic()):
                    self._mailbox.put(command)


async def _write(outgoing: Outgoing, context: grpc.aio.ServicerContext) -> None:
    while (message := await outgoing.get()) is not None:
        await context.write(message)


async def _end(context: grpc.aio.ServicerContext, outgoing: Outgoing, error: object) -> None:
    if isinstance(error, ProtocolError):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    if outgoing.is_overfull:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the router does not read its Session and was cut off")
    if outgoing.is_closed:
        await context.abort(grpc.StatusCode.UNAVAILABLE, "this scheduler is ending: continue on another replica")
