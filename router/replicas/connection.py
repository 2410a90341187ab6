"""The connection to a scheduler: finds its address and keeps a channel there, over which a replica holds Sessions."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from runtime.security.tls import open_channel
from runtime.wire import SESSION_MESSAGE_BYTES

if TYPE_CHECKING:
    # A replica has a connection, which serves it.
    from router.replicas.replica import Replica

log = logging.getLogger("octavo.router.replicas")

_FILE = "file:"
# Short compared to the seconds that a scheduler takes to come back elsewhere.
_FILE_CHECK_S = 0.25


class AddressResolver:
    """Resolves an entry of scheduler_addresses: an address that gRPC knows, or file:PATH of a file that holds one.

    A scheduler moves by replacing that file (a new one is written and renamed); until it exists, the scheduler's
    address is unknown.
    """

    def __init__(self, entry: str) -> None:
        self.is_fixed = not entry.startswith(_FILE)
        self._entry, self._path = entry, Path(entry.removeprefix(_FILE))

    async def other_than(self, address: str) -> str:
        """Waits for an address other than `address`; empty: for any. A fixed address never changes."""
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


CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", SESSION_MESSAGE_BYTES),
    ("grpc.max_send_message_length", SESSION_MESSAGE_BYTES),
    # A scheduler that comes back is found within a second: its streams may wait for it.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Own connections: failures of other channels do not raise this one's backoff.
    ("grpc.use_local_subchannel_pool", 1),
    # Finds a host that vanishes before its Welcome, when no message is due. The scheduler allows a ping every 10 s.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Without it, gRPC waits 60 s for the answer to a ping, whatever the line above says.
    ("grpc.http2.ping_timeout_ms", 10_000),
    # Lets only a step or two be under way to a router that lags: the scheduler keeps later ones, and sends them in one
    # message. With 64 KB, and a third of a core for 1,000 streams of 30 tokens/s, a tenth of the tokens got through.
    ("grpc.http2.lookahead_bytes", 8 * 1024),
    ("grpc.http2.bdp_probe", 0),
]
# How often a replica without a Session checks for a renewed certificate of ours.
_CERTIFICATE_CHECK_S = 1.0

# The cause of a Session's end if this router ended it itself.
ENDED_HERE = "the Session ended"


class Connection:
    """Keeps a channel to a scheduler; opens a new one when it moves or our certificate is renewed."""

    def __init__(self, entry: str, credentials: Callable[[], grpc.ChannelCredentials] | None) -> None:
        """entry: of scheduler_addresses. credentials: returns those in force, which may change; None: no TLS."""
        # None until `run` has begun.
        self.channel: grpc.aio.Channel | None = None
        # Why a Session ends, if this router ends it now.
        self.ended_here = ENDED_HERE
        self._resolver = AddressResolver(entry)
        self._credentials = credentials

    @property
    def has_fixed_address(self) -> bool:
        return self._resolver.is_fixed

    async def run(self, replica: "Replica") -> None:
        """Keeps connecting to the scheduler's current address until the task is cancelled."""
        address = ""
        while True:
            address = await self._resolver.other_than(address)
            if not self._resolver.is_fixed:
                replica.note_address(address)
            connected = asyncio.create_task(self._stay_connected(address, replica))
            moved = asyncio.create_task(self._resolver.other_than(address))
            try:
                await asyncio.wait({connected, moved}, return_when=asyncio.FIRST_COMPLETED)
                if connected.done():
                    connected.result()
                self.ended_here = f"it is not at {address} any more"
            finally:
                moved.cancel()
                connected.cancel()
                await asyncio.wait({connected, moved})
                self.ended_here = ENDED_HERE

    async def _stay_connected(self, address: str, replica: "Replica") -> None:
        """Keeps a channel until the task is cancelled, another one after a silence. Uses a renewed certificate of ours
        once there is no Session."""
        while True:
            credentials = self._current_credentials()
            async with open_channel(address, credentials, CHANNEL_OPTIONS) as channel:
                self.channel = channel
                holding = asyncio.create_task(replica.hold_sessions(channel))
                try:
                    while replica.session is not None or self._current_credentials() is credentials:
                        done, _ = await asyncio.wait(
                            {holding}, timeout=None if credentials is None else _CERTIFICATE_CHECK_S
                        )
                        if done:
                            holding.result()
                            break
                finally:
                    holding.cancel()
                    await asyncio.wait({holding})

    def _current_credentials(self) -> grpc.ChannelCredentials | None:
        return None if self._credentials is None else self._credentials()
