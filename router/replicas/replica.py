"""One replica as this router sees it: resolves its address, keeps a Session with its scheduler open, and judges
whether it can take requests.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import grpc.aio
from grpc.aio import EOF  # type: ignore[attr-defined]

from protos.inference_pb2 import FINISH_REASON_CANCELLED, FINISH_REASON_ERROR
from protos.scheduler_pb2 import Open, RouterMessage, SchedulerMessage
from protos.scheduler_pb2_grpc import SchedulerStub
from router.replicas.breaker import Breaker, Progress
from router.replicas.policies.prefix_index import PrefixIndex
from router.replicas.session import Session, SessionError, check_welcome
from runtime.security.tls import open_channel
from runtime.wire import PROTOCOL_VERSION, SESSION_MESSAGE_BYTES

log = logging.getLogger("octavo.router.replicas")

_FILE = "file:"
# A scheduler that comes back elsewhere has taken seconds to do so.
_FILE_CHECK_S = 0.25


class AddressResolver:
    """Of one entry of scheduler_addresses: an address that gRPC knows, or file:PATH of a file that holds one. Whoever
    moves the scheduler replaces that file (writes another and renames it); until it is there, nobody knows."""

    def __init__(self, entry: str) -> None:
        self.is_fixed = not entry.startswith(_FILE)
        self._entry, self._path = entry, Path(entry.removeprefix(_FILE))

    async def other_than(self, address: str) -> str:
        """The address, once it is another one than that; empty asks for any. One that is fixed stays."""
        if self.is_fixed:
            if address:
                await asyncio.Event().wait()
            return self._entry
        cause = ""
        while True:
            try:
                found = self._path.read_text().strip()
            except FileNotFoundError:
                found = ""
            except (OSError, UnicodeDecodeError) as error:
                found = ""
                if cause != (cause := str(error)):
                    log.warning("scheduler_addresses: %s cannot be read: %s", self._entry, cause)
            if found and found != address:
                return found
            await asyncio.sleep(_FILE_CHECK_S)


_ENDED_HERE = "the Session ended"

_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", SESSION_MESSAGE_BYTES),
    ("grpc.max_send_message_length", SESSION_MESSAGE_BYTES),
    # A scheduler that comes back is found within a second: its streams may wait for it.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A channel of one's own, whose backoff nobody else has driven up.
    ("grpc.use_local_subchannel_pool", 1),
    # A host that vanishes says nothing, and before the Welcome nothing is due. The scheduler allows a ping each 10 s.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # A step or two may be under way to a router that lags. Its scheduler keeps the next ones, and sends them in one
    # message: with 64 KB, and a third of a core for 1,000 streams of 30 tokens/s, a tenth of the tokens got through.
    ("grpc.http2.lookahead_bytes", 8 * 1024),
    ("grpc.http2.bdp_probe", 0),
]
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.1, 2.0
_HELD_S = 1.0
# How often a replica without a Session looks whether its certificate has been renewed.
_CERTIFICATE_CHECK_S = 1.0


class Replica:
    """One scheduler: connects, reads, connects again, until its task is cancelled."""

    def __init__(
        self,
        number: int,
        address: str,
        router_id: str,
        model_name: str,
        silence_timeout: float,
        prefix_index: PrefixIndex | None,
        changed: Callable[[], None],
        credentials: Callable[[], grpc.ChannelCredentials] | None = None,
        stall_timeout: float = 0.0,
        on_left_out: Callable[[str], None] = lambda address: None,
    ):
        """silence_timeout: seconds without a message after which a scheduler counts as dead; one is due each second.
        prefix_index: is told of its cache events, if there is one. credentials: those in force, which
        may change; None for no TLS. stall_timeout: seconds
        without a step, though there is something to run, after which it counts as stalled; 0: never. on_left_out: gets
        its address each time the breaker opens."""
        self.number = number
        # As scheduler_addresses has it.
        self.address = address
        self._whereabouts = AddressResolver(address)
        self.session: Session | None = None
        # None until `run` has begun.
        self.channel: grpc.aio.Channel | None = None
        self.breaker = Breaker()
        self._progress = Progress(stall_timeout)
        self._stall_timeout = stall_timeout
        self._on_left_out = on_left_out
        self._router_id = router_id
        self._model_name = model_name
        self._silence_timeout = silence_timeout
        self._prefix_index = prefix_index
        self._changed = changed
        self._credentials = credentials
        self._cause = "not connected yet" if self._whereabouts.is_fixed else "nobody knows where it is yet"
        self._ended_here = _ENDED_HERE
        self._since = time.monotonic()

    @property
    def usable(self) -> bool:
        """Takes requests, though it may queue them while its workers are away."""
        return self.session is not None and not self.session.load.draining

    @property
    def ready(self) -> bool:
        return self.usable and self.session is not None and self.session.load.workers_ready

    @property
    def fingerprint(self) -> str:
        """Empty while it is away."""
        return "" if self.session is None else self.session.welcome.model.fingerprint

    @property
    def draining(self) -> bool:
        return self.session is not None and self.session.load.draining

    @property
    def stalled(self) -> bool:
        """Its steps do not complete, and it is not on probation."""
        return self._progress.is_stalled and self.breaker.is_open(time.monotonic())

    def describe(self) -> str:
        """In a few words, for people: why it is not ready, or gets no requests, and for how long."""
        if self.session is None:
            return f"{self.address}: {self._cause} (for {self._seconds_so:.0f} s)"
        text = f"{self.address} is ready"
        if not self.ready:
            cause = "draining" if self.draining else "its workers are away"
            text = f"{self.address}: {cause} (for {self._seconds_so:.0f} s)"
        left_out = self.breaker.describe(time.monotonic())
        return f"{text}, but {left_out}" if left_out else text

    @property
    def _seconds_so(self) -> float:
        return time.monotonic() - self._since

    async def run(self) -> None:
        place = ""
        while True:
            place = await self._whereabouts.other_than(place)
            if not self._whereabouts.is_fixed:
                log.info("%s: it is at %s", self.address, place)
                self._cause = "not connected yet"
            staying = asyncio.create_task(self._stay_connected(place))
            moving = asyncio.create_task(self._whereabouts.other_than(place))
            try:
                await asyncio.wait({staying, moving}, return_when=asyncio.FIRST_COMPLETED)
                if staying.done():
                    staying.result()
                self._ended_here = f"it is not at {place} any more"
            finally:
                moving.cancel()
                staying.cancel()
                await asyncio.wait({staying, moving})
                self._ended_here = _ENDED_HERE

    async def _stay_connected(self, place: str) -> None:
        """Until the task is cancelled. A renewed certificate of ours is shown once there is no Session."""
        while True:
            credentials = self._current_credentials()
            async with open_channel(place, credentials, _CHANNEL_OPTIONS) as channel:
                self.channel = channel
                holding = asyncio.create_task(self._hold_sessions(channel))
                try:
                    while self.session is not None or self._current_credentials() is credentials:
                        done, _ = await asyncio.wait(
                            {holding}, timeout=None if credentials is None else _CERTIFICATE_CHECK_S
                        )
                        if done:
                            holding.result()
                finally:
                    holding.cancel()
                    await asyncio.wait({holding})

    def _current_credentials(self) -> grpc.ChannelCredentials | None:
        return None if self._credentials is None else self._credentials()

    async def _hold_sessions(self, channel: grpc.aio.Channel) -> None:
        """One after the other, until the task is cancelled."""
        retry = _FIRST_RETRY_S
        while True:
            began = time.monotonic()
            welcomed, cause = await self._hold_session(SchedulerStub(channel))
            if cause != self._cause:
                log.warning("%s: %s", self.address, cause)
            self._cause = cause
            # One whose Sessions break as soon as they are open is no better than one that refuses them.
            has_held = welcomed and time.monotonic() - began >= _HELD_S
            retry = _FIRST_RETRY_S if has_held else min(2 * retry, _LONGEST_RETRY_S)
            await asyncio.sleep(retry)

    async def _hold_session(self, stub: SchedulerStub) -> tuple[bool, str]:
        """Opens a Session and reads it to its end. Returns whether there was a Welcome, and why it ended."""
        call = stub.Session(wait_for_ready=True)
        try:
            opening = Open(
                protocol_version=PROTOCOL_VERSION,
                router_id=self._router_id,
                watch_cache=self._prefix_index is not None,
            )
            await call.write(RouterMessage(open=opening))
            return await self._read(call)
        except grpc.aio.AioRpcError as error:
            return False, f"Session refused, {error.code().name}: {error.details()}"
        except SessionError as error:
            return False, f"sent what no scheduler of this version sends: {error}"
        except Exception as error:
            # A message that no scheduler of ours sends must cost one Session, not the replica.
            log.exception("%s sent what can't be read", self.address)
            return False, f"the router failed on a message: {error!r}"
        finally:
            call.cancel()

    async def _read(self, call) -> tuple[bool, str]:
        message = await call.read()
        if message is EOF:
            return False, f"Session refused, {(await call.code()).name}: {await call.details()}"
        if not message.HasField("welcome"):
            return False, "its first message is no Welcome: is it a scheduler of this version?"
        name = message.welcome.model.name
        if name != self._model_name:
            return (
                False,
                f"serves {name!r}, not {self._model_name!r}: give router and schedulers the same model options",
            )
        check_welcome(message.welcome)
        session = Session(message.welcome)
        self._open(session)
        writer = asyncio.create_task(_write(call, session))
        cause = ""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._silence_timeout) as silence:
                while message is not EOF:
                    was = self.usable, self.ready
                    session.receive(message)
                    if self._prefix_index is not None:
                        self._prefix_index.resize(self.number, session.welcome.model.num_blocks)
                        self._prefix_index.apply(self.number, message.cache_events)
                    self._judge(session, message)
                    if (self.usable, self.ready) != was:
                        self._note_change()
                    silence.reschedule(loop.time() + self._silence_timeout)
                    message = await call.read()
            cause = f"the Session ended, {(await call.code()).name}: {await call.details()}"
        except SessionError as error:
            cause = f"sent what no scheduler of this version sends: {error}"
        except TimeoutError:
            cause = f"silent for {self._silence_timeout:g} s"
        except grpc.aio.AioRpcError as error:
            cause = f"the Session broke, {error.code().name}: {error.details()}"
        finally:
            writer.cancel()
            try:
                # Not `await writer`: its cancellation could not be told from this task's own, which must get through.
                await asyncio.wait({writer})
            finally:
                self._close(session, cause or self._ended_here)
        return True, cause

    def _open(self, session: Session) -> None:
        self.session, self._progress = session, Progress(self._stall_timeout)
        model = session.welcome.model
        if self._prefix_index is not None:
            self._prefix_index.add(self.number, block_size=model.block_size, max_blocks=model.num_blocks)
        log.info("%s serves %s (%s, fingerprint %s)", self.address, model.name, model.dtype, model.fingerprint[:12])
        self._note_change()

    def _close(self, session: Session, cause: str) -> None:
        self.session, self._cause = None, cause
        if self._prefix_index is not None:
            self._prefix_index.remove(self.number)
        # What the router ends itself, when it stops, is nothing to be warned of.
        level = logging.INFO if cause == _ENDED_HERE and not session.num_groups else logging.WARNING
        log.log(level, "%s: %s; %d requests were on it", self.address, cause, session.num_groups)
        # One that shuts down, or is somewhere else now, is not at fault.
        if cause != self._ended_here and not session.load.draining:
            self._leave_out_if(self.breaker.broke(time.monotonic()))
        self._note_change()
        session.lose(f"{self.address}: {cause}")

    def _judge(self, session: Session, message: SchedulerMessage) -> None:
        """Whether it computes what it gets."""
        now, load = time.monotonic(), session.load
        for finish in message.outputs.finishes:
            if finish.reason == FINISH_REASON_ERROR:
                self._leave_out_if(self.breaker.failed(now))
            elif finish.reason != FINISH_REASON_CANCELLED:
                self.breaker.finished(now)
        if self._progress.advance(now, epoch=session.welcome.epoch, last_step=load.last_step):
            self.breaker.delivered(now)
        elif self._progress.is_overdue(now, has_work=session.num_groups > 0 or session.num_sequences > 0):
            self._leave_out_if(self.breaker.stalled(now, self._stall_timeout))
            self._note_change()

    def _leave_out_if(self, opened: bool) -> None:
        if opened:
            self._on_left_out(self.address)
            log.warning("%s is %s", self.address, self.breaker.describe(time.monotonic()))

    def _note_change(self) -> None:
        self._since = time.monotonic()
        self._changed()


async def _write(call, session: Session) -> None:
    """Ends with the call; the reader is told of that, too, and says why."""
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        while True:
            await call.write(await session.outgoing.get())
