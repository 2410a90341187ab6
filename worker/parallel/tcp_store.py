"""Where ranks on several machines find each other: a store in the process of the first of them.

It lives as long as that process, and serves one epoch after the other. What it holds is addresses; whoever reaches its
port can read and change them, so the network has to be private, as for what the ranks then send.
"""

import socket
import time
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from worker.errors import PermanentError, PlanError

# A store that is there answers in milliseconds.
_TIMEOUT_S = 10.0
# Names of machines that have just been started may be known a little later.
_NAME_PAUSE_S, _LONGEST_NAME_WAIT_S = 0.5, 60.0


def host_towards(endpoint: str, while_waiting: Callable[[], None]) -> str:
    """The address of this machine from which it reaches another: loopback for itself, so that it is one that the other
    machines of the cluster know, too.

    endpoint: tcp://HOST:PORT. while_waiting: called again and again while the host's name is not known; may raise.
    Raises OSError if it is not after a minute, or if there is no route.
    """
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    gives_up_at = time.monotonic() + _LONGEST_NAME_WAIT_S
    while True:
        try:
            family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
            break
        except socket.gaierror as error:
            if time.monotonic() >= gives_up_at:
                raise OSError(f"{host}: {error.strerror}; give worker_host, or a name that is known") from None
        while_waiting()
        time.sleep(_NAME_PAUSE_S)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Chooses a route; nothing is sent.
        probe.connect(address)
        return probe.getsockname()[0]


def hold_store(host: str) -> tuple[Store, str]:
    """A store that listens at a free port of one address of this machine, as long as it is referred to; and where:
    HOST:PORT, for step_pb2.Hello. Raises PermanentError."""
    try:
        # TCPStore's own binding takes all addresses.
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family)
    except OSError as error:
        raise PermanentError(
            f"worker_host={host!r}: cannot listen there ({error.strerror}); give an address of this machine"
        ) from None
    port: int = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=_TIMEOUT_S),
        master_listen_fd=listener.detach(),
    )
    return store, f"{_bracketed(host)}:{port}"


def store_at(place: str) -> Store:
    """What ranks of one epoch share of the store at HOST:PORT/EPOCH. May block for ever, if the machine has vanished or
    the process is stopped: see worker.parallel.patience. Raises PlanError, or RuntimeError
    if the store is not there."""
    address, _, epoch = place.rpartition("/")
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and epoch):
        raise PlanError(f"rendezvous: {place!r} is not of the form HOST:PORT/EPOCH")
    host = host.strip("[]")
    try:
        # TCPStore says the same in fifty lines, and tries for longer.
        socket.create_connection((host, int(port)), _TIMEOUT_S).close()
    except OSError as error:
        raise RuntimeError(error.strerror or str(error)) from None
    store = TCPStore(host, int(port), wait_for_workers=False, timeout=timedelta(seconds=_TIMEOUT_S))
    return PrefixStore(epoch, store)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
