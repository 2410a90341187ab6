"""One replica as this router sees it: holds a Session with its scheduler, and judges whether it can take requests."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import grpc
import grpc.aio
from grpc.aio import EOF  # type: ignore[attr-defined]

from configs.sampling import MAX_LOGPROBS
from protos.inference_pb2 import FINISH_REASON_CANCELLED, FINISH_REASON_ERROR
from protos.scheduler_pb2 import (
    PAUSE_MODE_ABORT,
    PAUSE_MODE_KEEP,
    PAUSE_MODE_NONE,
    PAUSE_MODE_UNSPECIFIED,
    PAUSE_MODE_WAIT,
    CacheEvent,
    Open,
    RouterMessage,
    SchedulerMessage,
    Welcome,
)
from protos.scheduler_pb2_grpc import SchedulerStub
from router.accepted import RoutingHints, fingerprint_of
from router.replicas.connection import ENDED_HERE, Connection
from router.replicas.health.breaker import Breaker, Progress
from router.replicas.health.held_back import Hold, Quarantined
from router.replicas.health.pace import Pace, State
from router.replicas.policies.prefix_index import PrefixIndex
from router.replicas.session import Session, SessionError, check_welcome
from router.telemetry.metrics import RouterMetrics
from router.turns import finish_in_slices
from runtime.awake_time import AwakeTime
from runtime.wire import PROTOCOL_VERSION

log = logging.getLogger("octavo.router.replicas")

# Delay between attempts to open a Session; back to the first after a Session that lasted _HELD_S.
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.1, 2.0
_HELD_S = 1.0
# Cache events that are applied in one go, in 0.2 ms.
_EVENTS_AT_ONCE = 256
# A Load is looked at for the replica's health at most so often, and more often if the pace's window is short. Requests
# that end are looked at as they do.
_LOOK_S = 0.25
# Longest time between two looks at a scheduler's silence.
_LONGEST_TICK_S = 1.0
# Why there is no Session, if nothing has come since it was opened. Routers are welcomed once the workers are ready,
# which takes minutes for large models.
_NO_WELCOME = "connected, not welcomed yet: its workers are not ready, or it hangs"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """Options that all replicas of a router share."""

    router_id: str
    # Returns where this router answers others (router.replicas.peers); empty: nowhere.
    peer_address: Callable[[], str] = str
    model_name: str
    # Seconds without a message after which a scheduler counts as dead; one is due each second.
    silence_timeout: float
    # Seconds without a step, though there is something to run, after which it counts as stalled; 0: never.
    stall_timeout: float = 0.0
    # Returns those in force, which may change; None: no TLS.
    credentials: Callable[[], grpc.ChannelCredentials] | None = None
    # Where `octavo up` says which replicas it has stopped; None: nowhere.
    runtime_dir: Path | None = None


class Silence:
    """A time limit between two messages of a scheduler, as far as this event loop was awake, for the task that reads
    them:

        async with Silence(10.0) as silence:  # raises TimeoutError
            while True:
                message = await call.read()
                silence.suspend()
                await take_in(message)
                silence.begin()

    After a stall of the event loop, timers run before the messages that have arrived meanwhile are read. So a stall
    counts as one tick at most: the messages are read long before the limit.
    """

    def __init__(self, limit: float) -> None:
        """limit: seconds without a message."""
        self._limit = limit
        self._tick_s = min(_LONGEST_TICK_S, limit / 4)
        self._awake = AwakeTime(self._tick_s)
        self._timeout = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None
        self._began = 0.0

    @property
    def awake_now(self) -> float:
        """A clock that stands still while the event loop does (seconds)."""
        now = asyncio.get_running_loop().time()
        self._awake.wake(now)
        return now - self._awake.stalled_s

    def suspend(self) -> None:
        """Notes a message: the silence before it has ended, and none is counted until `begin`. While a message is taken
        in, the next one may wait to be read."""
        self._began = math.inf
        if self._timeout.when() is not None:
            self._timeout.reschedule(None)

    def begin(self) -> float:
        """Counts silence from now on. Returns `awake_now`."""
        self._began = self.awake_now
        return self._began

    async def __aenter__(self) -> "Silence":
        await self._timeout.__aenter__()
        self._began = self.awake_now
        self._tick()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._timeout.__aexit__(kind, error, traceback)

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        if self.awake_now - self._began >= self._limit:
            self._timeout.reschedule(loop.time())
        else:
            self._timer = loop.call_later(self._tick_s, self._tick)


# Pauses in which a replica takes no new requests.
_REFUSING = (PAUSE_MODE_ABORT, PAUSE_MODE_WAIT)


class Replica:
    """One scheduler; `run` keeps a Session with it."""

    def __init__(
        self,
        number: int,
        address: str,
        options: ReplicaOptions,
        metrics: RouterMetrics,
        *,
        pace: Pace,
        prefix_index: PrefixIndex | None,
        on_change: Callable[[], None],
    ) -> None:
        """pace: its own. prefix_index: takes in the replica's cache events. on_change: called when it becomes usable or
        ready, ceases to be, stalls, or changes its pace."""
        self.number = number
        # Its entry in scheduler_addresses.
        self.address = address
        self.session: Session | None = None
        # Features (configs.features) and max_logprobs of its latest Welcome, kept while there is no Session.
        self.features: frozenset[str] = frozenset()
        # ModelInfo.media_json of that Welcome: a replica that takes items is missed, not forgotten, while it is away.
        self.media_json = ""
        self.max_logprobs = MAX_LOGPROBS
        self.breaker = Breaker()
        self.hold = Hold.NONE
        self.pace = pace
        # From the start at 0: a dashboard's query of a series that is not there yet gives nothing.
        metrics.replicas_left_out.labels(address)
        metrics.slow_replicas_left_out.labels(address)
        metrics.replica_pace.labels(address).set_function(lambda: pace.state)
        metrics.replica_slowness.labels(address).set_function(lambda: pace.slowness)
        self._quarantined = Quarantined(options.runtime_dir, number)
        metrics.quarantined.labels(address).set_function(lambda: self.session is None and self._quarantined.is_so)
        metrics.quarantines.follow(address, lambda: self._quarantined.count)
        self._options = options
        self._metrics = metrics
        self._prefix_index = prefix_index
        self._on_change = on_change
        self._connection = Connection(address, options.credentials)
        self._progress = Progress(options.stall_timeout)
        # Why there is no Session, for people.
        self._cause = "not connected yet" if self._connection.has_fixed_address else "its address is not known yet"
        self._since = time.monotonic()
        # On the clock of the Session's Silence.
        self._next_look = 0.0

    @property
    def channel(self) -> grpc.aio.Channel | None:
        """None until `run` has begun."""
        return self._connection.channel

    @property
    def num_routers(self) -> int:
        """Sessions of routers with it, this one's included, as it said last; 0: not known."""
        return 0 if self.session is None else self.session.load.num_routers

    @property
    def usable(self) -> bool:
        """True if it takes requests, though it may queue them while its workers are away."""
        if self.session is None or self.hold is not Hold.NONE:
            return False
        return not self.session.load.draining and self.session.load.paused not in _REFUSING

    @property
    def ready(self) -> bool:
        return self.usable and self.session is not None and self.session.load.workers_ready

    def fingerprint(self, hints: RoutingHints) -> str:
        """Returns its fingerprint for a request (router.accepted.fingerprint_of); empty while there is no Session."""
        return "" if self.session is None else fingerprint_of(self.session.welcome.model, hints.features)

    @property
    def draining(self) -> bool:
        """True if its streams are to leave."""
        return self.session is not None and (self.session.load.draining or self.hold is Hold.DRAINED)

    @property
    def stalled(self) -> bool:
        """True if its steps do not complete and it is not on probation."""
        return self._progress.is_stalled and self.breaker.is_open(time.monotonic())

    @property
    def too_slow(self) -> bool:
        """True if its streams would be served better elsewhere."""
        return self.pace.state is State.LEFT_OUT

    def describe(self) -> str:
        """Says in a few words, for people, why it is not ready or gets no requests, and for how long."""
        if self.session is None:
            cause = self._quarantined.describe() or f"{self._cause} (for {self._seconds_so:.0f} s)"
            return f"{self.address}: {cause}"
        text = f"{self.address} is ready"
        if not self.ready:
            cause = "draining" if self.session.load.draining else "its workers are away"
            if self.session.load.paused in _REFUSING:
                cause = "paused for all routers"
            if self.hold is not Hold.NONE:
                cause = f"{self.hold.value} by an operator"
            text = f"{self.address}: {cause} (for {self._seconds_so:.0f} s)"
        now = time.monotonic()
        left_out = self.breaker.describe(now) or self.pace.describe(now)
        return f"{text}, but {left_out}" if left_out else text

    @property
    def state(self) -> str:
        """Its state in one word: ReplicaView.state of protos/admin.proto."""
        if self.session is None:
            return "quarantined" if self._quarantined.is_so else "away"
        if self.hold is not Hold.NONE:
            return self.hold.value
        if self.draining:
            return "draining"
        if self.session.load.paused not in (PAUSE_MODE_UNSPECIFIED, PAUSE_MODE_NONE):
            return Hold.PAUSED.value
        if not self.ready:
            return "loading"
        return "left_out" if self.breaker.describe(time.monotonic()) or self.too_slow else "ready"

    def set_hold(self, hold: Hold) -> None:
        """Takes an operator's word."""
        if hold is not self.hold:
            log.warning("%s: %s by an operator", self.address, "released" if hold is Hold.NONE else hold.value)
            self.hold = hold
            self._note_change()

    @property
    def _seconds_so(self) -> float:
        return time.monotonic() - self._since

    async def run(self) -> None:
        """Connects, reads and reconnects until the task is cancelled."""
        await self._connection.run(self)

    def note_address(self, address: str) -> None:
        """Takes the scheduler's new address; not called for a fixed one."""
        log.info("%s: it is at %s", self.address, address)
        self._cause = "not connected yet"

    async def hold_sessions(self, channel: grpc.aio.Channel) -> None:
        """Opens Sessions, one after the other, until the task is cancelled or nothing comes over this channel: its
        connection may be half-open."""
        retry = _FIRST_RETRY_S
        while True:
            began = time.monotonic()
            welcomed, cause = await self._hold_session(SchedulerStub(channel))
            if cause != self._cause:
                log.log(logging.INFO if cause == _NO_WELCOME else logging.WARNING, "%s: %s", self.address, cause)
            self._cause = cause
            if cause in (self._silent, _NO_WELCOME):
                return
            # A scheduler whose Sessions break as soon as they are open is no better than one that refuses them.
            has_held = welcomed and time.monotonic() - began >= _HELD_S
            retry = _FIRST_RETRY_S if has_held else min(2 * retry, _LONGEST_RETRY_S)
            await asyncio.sleep(retry)

    @property
    def _silent(self) -> str:
        """The cause if nothing has come for too long."""
        return f"silent for {self._options.silence_timeout:g} s"

    async def _hold_session(self, stub: SchedulerStub) -> tuple[bool, str]:
        """Opens a Session and reads it to its end. Returns whether there was a Welcome, and why it ended."""
        call = stub.Session(wait_for_ready=True)
        try:
            opening = Open(
                protocol_version=PROTOCOL_VERSION,
                router_id=self._options.router_id,
                peer_address=self._options.peer_address(),
                watch_cache=self._prefix_index is not None,
            )
            await call.write(RouterMessage(open=opening))
            return await self._read(call)
        except grpc.aio.AioRpcError as error:
            return False, f"Session refused, {error.code().name}: {error.details()}"
        except SessionError as error:
            return False, f"sent a message that breaks the protocol: {error}"
        except Exception as error:
            # A malformed message must cost one Session, not the replica.
            log.exception("%s sent what can't be read", self.address)
            return False, f"the router failed on a message: {error!r}"
        finally:
            call.cancel()

    async def _read(self, call) -> tuple[bool, str]:
        try:
            async with Silence(self._options.silence_timeout):
                message = await call.read()
        except TimeoutError:
            return False, _NO_WELCOME
        if message is EOF:
            return False, f"Session refused, {(await call.code()).name}: {await call.details()}"
        if not message.HasField("welcome"):
            return False, "its first message is not a Welcome: is it a scheduler of this version?"
        name = message.welcome.model.name
        if name != self._options.model_name:
            return (
                False,
                f"serves {name!r}, not {self._options.model_name!r}: give router and schedulers the same model options",
            )
        check_welcome(message.welcome)
        session = Session(message.welcome)
        self._open(session)
        writer = asyncio.create_task(_write(call, session))
        cause = ""
        try:
            async with Silence(self._options.silence_timeout) as silence:
                while message is not EOF:
                    load = session.load
                    was = load.draining, load.paused, load.workers_ready
                    silence.suspend()
                    await self._take_in(session, message)
                    awake_now = silence.begin()
                    if awake_now >= self._next_look or message.outputs.finishes or message.HasField("welcome"):
                        self._observe(session, message, awake_now)
                        self._next_look = awake_now + min(_LOOK_S, self.pace.interval)
                    load = session.load
                    if (load.draining, load.paused, load.workers_ready) != was:
                        self._note_change()
                    message = await call.read()
            cause = f"the Session ended, {(await call.code()).name}: {await call.details()}"
        except SessionError as error:
            cause = f"sent a message that breaks the protocol: {error}"
        except TimeoutError:
            cause = self._silent
        except grpc.aio.AioRpcError as error:
            cause = f"the Session broke, {error.code().name}: {error.details()}"
        finally:
            writer.cancel()
            try:
                # Not `await writer`: its cancellation would look like this task's own, which must get through.
                await asyncio.wait({writer})
            finally:
                self._close(session, cause or self._connection.ended_here)
        return True, cause

    async def _take_in(self, session: Session, message: SchedulerMessage) -> None:
        """Takes in a message, which may hold many steps, and lets the event loop run in between."""
        await session.receive_in_slices(message)
        if message.HasField("welcome"):
            self._note_abilities(message.welcome)
        if self._prefix_index is not None:
            self._prefix_index.resize(self.number, session.welcome.model.num_blocks)
            if message.cache_events:
                await finish_in_slices(self._apply_events(self._prefix_index, message.cache_events))

    def _apply_events(self, index: PrefixIndex, events: Sequence[CacheEvent]) -> Iterator[None]:
        for start in range(0, len(events), _EVENTS_AT_ONCE):
            index.apply(self.number, events[start : start + _EVENTS_AT_ONCE])
            yield

    def _open(self, session: Session) -> None:
        self.session, self._progress, self._next_look = session, Progress(self._options.stall_timeout), 0.0
        self._note_abilities(session.welcome)
        model = session.welcome.model
        if self._prefix_index is not None:
            self._prefix_index.add(self.number, block_size=model.block_size, max_blocks=model.num_blocks)
        log.info("%s serves %s (%s, fingerprint %s)", self.address, model.name, model.dtype, model.fingerprint[:12])
        self._note_change()

    def _note_abilities(self, welcome: Welcome) -> None:
        self.features, self.max_logprobs = frozenset(welcome.features), welcome.max_logprobs or MAX_LOGPROBS
        self.media_json = welcome.model.media_json

    def can(self, hints: RoutingHints) -> bool:
        """Returns True if it has the features that a request needs."""
        return hints.features <= self.features and hints.num_logprobs <= self.max_logprobs

    def _close(self, session: Session, cause: str) -> None:
        self.session, self._cause = None, cause
        if self._prefix_index is not None:
            self._prefix_index.remove(self.number)
        # A Session that the router itself ends, when it stops, needs no warning.
        level = logging.INFO if cause == ENDED_HERE and not session.num_groups else logging.WARNING
        log.log(level, "%s: %s; %d requests were on it", self.address, cause, session.num_groups)
        self.pace.end()
        # A scheduler that shuts down or has moved is not at fault.
        if cause != self._connection.ended_here and not session.load.draining:
            self._note_if_left_out(self.breaker.broke(time.monotonic()))
        self._note_change()
        session.lose(f"{self.address}: {cause}")

    def _observe(self, session: Session, message: SchedulerMessage, awake_now: float) -> None:
        """Updates breaker and pace from a message: from the requests that finished and the steps that completed.

        awake_now: a clock without this router's own stalls, because a replica is not to be blamed for them.
        """
        now, load = time.monotonic(), session.load
        for finish in message.outputs.finishes:
            if finish.reason == FINISH_REASON_ERROR and not finish.no_token:
                self._note_if_left_out(self.breaker.failed(now))
            elif finish.reason != FINISH_REASON_CANCELLED:
                self.breaker.finished(now)
        if self._progress.advance(awake_now, epoch=session.welcome.epoch, last_step=load.last_step):
            self.breaker.delivered(now)
        elif self._progress.is_overdue(
            awake_now,
            has_work=load.paused != PAUSE_MODE_KEEP and (session.num_groups > 0 or session.num_sequences > 0),
        ):
            self._note_if_left_out(self.breaker.stalled(now, self._options.stall_timeout))
            self._note_change()
        if message.HasField("welcome"):
            self.pace.begin(now, session.welcome.model.fingerprint, load)
        elif message.HasField("load") and self.pace.note(now, load):
            self._note_pace(now)

    def _note_pace(self, now: float) -> None:
        """Logs and reports that its pace has changed."""
        pace = self.pace
        if self.too_slow:
            self._metrics.slow_replicas_left_out.labels(self.address).inc()
        level = logging.INFO if pace.state in (State.FULL, State.PROBED) else logging.WARNING
        log.log(level, "%s: %s", self.address, pace.describe(now) or "its steps are as fast as elsewhere again")
        self._on_change()

    def _note_if_left_out(self, opened: bool) -> None:
        """Counts and logs that the replica is left out. opened: its breaker has just opened."""
        if opened:
            self._metrics.replicas_left_out.labels(self.address).inc()
            log.warning("%s is %s", self.address, self.breaker.describe(time.monotonic()))

    def _note_change(self) -> None:
        self._since = time.monotonic()
        self._on_change()


async def _write(call, session: Session) -> None:
    """Writes the Session's messages until the call ends; the reader notices that, too, and says why."""
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        while True:
            for message in await session.next_messages():
                await call.write(message)
