"""The scheduler's sockets: claims and binds addresses, and counts invalid messages."""

import errno
import fcntl
import logging
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import zmq

from configs.options import Options
from runtime.grpc_setup.server import is_loopback, why_not_bound
from runtime.process import private_directory
from runtime.security.curve import server_curve
from runtime.wire import coordination_endpoint, heartbeat_endpoint
from runtime.zmq_silence import end_silent_connections


class AddressError(OSError):
    """An address that can't be listened on; the message names the option, the address and what would work."""


class AddressClaims:
    """Locks beside socket files, which protect the sockets of live processes.

    gRPC and ZeroMQ both unlink a socket file that is in their way, even if a live process listens on it. The kernel
    frees a lock whenever its process ends, even after a crash.
    """

    def __init__(self, options: Options, replica: int) -> None:
        """Claims the replica's socket files and removes stale ones. Raises AddressError."""
        self._locks: list[int] = []
        step_address = options.step_address(replica)
        addresses = [options.scheduler_address(replica), step_address, heartbeat_endpoint(step_address)]
        if options.in_lockstep and replica == 0:
            addresses.append(coordination_endpoint(step_address))
        addresses += filter(None, options.kv_events_endpoints(replica))
        paths = [path_of(address) for address in addresses]
        try:
            # The ranks' rendezvous files are in runtime_dir.
            holds_files = (options.world_size > 1 or options.in_lockstep) and not options.meets_over_tcp(replica)
            if holds_files or any(path is not None and path.parent == options.runtime_dir for path in paths):
                private_directory(options.runtime_dir)
            for path in paths:
                if path is not None:
                    self._claim(path)
        except OSError as error:
            self.release()
            if isinstance(error, AddressError):
                raise
            raise AddressError(f"runtime_dir={str(options.runtime_dir)!r}: {error}") from None

    def release(self) -> None:
        for lock in self._locks:
            os.close(lock)
        self._locks.clear()

    def _claim(self, path: Path) -> None:
        try:
            lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise AddressError(f"cannot listen on {path}: {error.strerror}; give another runtime_dir") from None
        self._locks.append(lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AddressError(
                f"{path} is in use by a running scheduler: end it, or give another runtime_dir or --replica"
            ) from None
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
            path.unlink()


def path_of(address: str) -> Path | None:
    """The socket file of an address; None for tcp."""
    for prefix in ("ipc://", "unix://", "unix:"):
        if address.startswith(prefix):
            return Path(address.removeprefix(prefix))
    return None


def is_private(address: str) -> bool:
    """True if only this machine can reach a gRPC address."""
    if path_of(address) is not None:
        return True
    return is_loopback(address.rpartition(":")[0])


def bind_zmq(
    context: zmq.Context,
    endpoint: str,
    curve_dir: Path | None,
    *,
    max_message_bytes: int,
    queue: int,
    timeout: float,
    takes_over: bool = False,
) -> zmq.Socket:
    """Binds a ROUTER socket that reports peers that are gone or do not read; only the calling thread may use it.

    queue: number of messages that may wait for one peer. timeout: seconds of silence after which a tcp connection is
    closed. takes_over: a new connection replaces one of the same identity; otherwise it is ignored. Raises AddressError
    or CurveError.
    """
    bound: zmq.Socket = context.socket(zmq.ROUTER)
    try:
        bound.setsockopt(zmq.LINGER, 0)
        bound.setsockopt(zmq.ROUTER_MANDATORY, 1)
        bound.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        bound.setsockopt(zmq.SNDHWM, queue)
        bound.setsockopt(zmq.ROUTER_HANDOVER, int(takes_over))
        if endpoint.startswith("tcp://"):
            end_silent_connections(bound, endpoint, timeout)
            if curve_dir is not None:
                server_curve(bound, curve_dir)
        bound.bind(endpoint)
    except zmq.ZMQError as error:
        bound.close(linger=0)
        raise AddressError(f"step_addresses: cannot listen on {endpoint}: {_why(error)}") from None
    except BaseException:
        bound.close(linger=0)
        raise
    return bound


def close_monitored(closed: zmq.Socket, monitor: zmq.Socket, *, linger: int = 0) -> None:
    """Closes a socket and its monitor, both also if one fails. linger: ms that the last messages get to leave."""
    with ExitStack() as stack:
        stack.callback(closed.close, linger=linger)
        stack.callback(monitor.close, linger=0)
        closed.disable_monitor()


def _why(error: zmq.ZMQError) -> str:
    if error.errno == errno.ENAMETOOLONG:
        return "the path is too long for a socket; give a shorter runtime_dir"
    if error.errno == errno.EADDRINUSE:
        return "in use; end the process that listens there (heartbeats take the next port), or name another port"
    return f"{error.strerror}; step_addresses takes ipc://PATH or tcp://HOST:PORT of this machine"


def why_not_listening(address: str) -> str:
    """The reason why a gRPC address can't be listened on, which gRPC itself does not report."""
    host, _, port = address.rpartition(":")
    if path_of(address) is not None or not port.isdecimal():
        return f"scheduler_addresses: cannot listen on {address!r}; give HOST:PORT or unix:PATH, of at most 107 bytes"
    cause = why_not_bound(host, int(port))
    return f"scheduler_addresses: cannot listen on {address!r}: {cause}; name another port"


log = logging.getLogger("octavo.scheduler")

_MAX_PEERS = 1024
# Log lines a minute, for all peers together.
_MAX_LINES = 10


class InvalidMessages:
    """Counts and logs invalid messages, from any thread. To keep a flood out of the log, it writes one line per peer,
    and at most ten a minute in all."""

    def __init__(self, count: Callable[[], None]) -> None:
        """count: called for each invalid message."""
        self._count = count
        self._lock = threading.Lock()
        self._peers: set[bytes] = set()
        self._line_times: deque[float] = deque(maxlen=_MAX_LINES)

    def note(self, peer: bytes, why: str) -> None:
        """peer: a ZeroMQ identity."""
        self._count()
        with self._lock:
            now = time.monotonic()
            is_flood = len(self._line_times) == _MAX_LINES and now - self._line_times[0] < 60.0
            if peer in self._peers or is_flood:
                return
            if len(self._peers) >= _MAX_PEERS:
                self._peers.clear()
            self._peers.add(peer)
            self._line_times.append(now)
        log.warning("ignored a message of peer %r: %s (logged once per peer; all are counted)", peer[:64], why)
