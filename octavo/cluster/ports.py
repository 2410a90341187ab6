"""Checks that a cluster's ports are free before anything starts, and claims those that several processes share.

A bind that fails later would look like a process that dies again and again. Also, gRPC's servers set SO_REUSEPORT, so
two routers, or two clusters, could silently share one port.
"""

import errno
import random
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from configs.options import Options
from octavo.cluster.errors import ClusterError

# For ports in a row: one may have no free neighbour.
_MOST_TRIES = 100
# Below the ports that Linux gives to outgoing connections, 32768 and up: they may take one before a process listens.
_CHOSEN = range(20_000, 32_000)


@dataclass(frozen=True, slots=True)
class _Port:
    option: str
    flag: str
    host: str
    port: int


def resolve_ports(options: Options) -> Options:
    """Returns the options with port=0 replaced by a free port, followed by free ports for further routers.

    Raises ClusterError, naming the option, if a port is taken.
    """
    options = with_port(options)
    for taken in unusable_ports(options):
        raise ClusterError(f"{taken.option}={_show(getattr(options, taken.option))}: {taken.found}; {taken.advice}")
    return options


def with_port(options: Options) -> Options:
    """Replaces port=0 by a free port, with free ones after it for further routers. Raises ClusterError."""
    if options.port:
        return options
    return options.model_copy(update={"port": _free_ports(options.host, options.num_routers)})


def with_free_ports(options: Options) -> Options:
    """Replaces ports that were not given by free ones: for a cluster of one program. Raises ClusterError."""
    counts = {"port": options.num_routers, "http_port": options.num_routers, "metrics_port": options.num_processes}
    free = _free_ports(options.host, sum(counts.values()))
    update: dict[str, int] = {}
    for name, count in counts.items():
        # Such a program asks over HTTP.
        if name not in options.model_fields_set or (name == "http_port" and not options.http_port):
            update[name] = free
        free += count
    return options.model_copy(update=update)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusablePort:
    """A port that nothing of ours can listen on. found: what is wrong. advice: what would work."""

    option: str
    host: str
    port: int
    found: str
    advice: str


def unusable_ports(options: Options) -> Iterator[UnusablePort]:
    """Yields the ports that the options name and that cannot be had. port: not 0 (`with_port`)."""
    for each in _ports(options):
        error = _bind_error(each.host, each.port)
        if error is None:
            continue
        if error.errno == errno.EADDRINUSE:
            found = f"port {each.port} of {each.host} is in use"
            advice = f"stop what listens there, or give another with {each.flag}{_suggestion(options, each)}"
        else:
            found = f"cannot listen on {each.host}:{each.port}: {error.strerror}"
            advice = f"give an address of this machine, and a port above 1023 unless you are root, with {each.flag}"
        yield UnusablePort(option=each.option, host=each.host, port=each.port, found=found, advice=advice)


def ports_by_option(options: Options) -> dict[str, list[int]]:
    """Maps each option that names ports to these ports."""
    found: dict[str, list[int]] = {}
    for each in _ports(options):
        found.setdefault(each.option, []).append(each.port)
    return found


def _ports(options: Options) -> list[_Port]:
    routers = range(options.num_routers)
    ports = [_Port("port", "--port", options.host, options.router_port(router)) for router in routers]
    if options.http_port:
        ports += [
            _Port("http_port", "--http-port", options.host, options.router_http_port(router)) for router in routers
        ]
    if options.metrics_port:
        ports += [
            _Port("metrics_port", "--metrics-port", options.metrics_host, options.metrics_port + i)
            for i in range(options.num_processes)
        ]
    for address in options.scheduler_addresses:
        if not address.startswith("unix:"):
            host, _, port = address.rpartition(":")
            ports.append(_Port("scheduler_addresses", "--scheduler-addresses", host, int(port)))
    for replica, address in enumerate(options.step_addresses):
        if address.startswith("tcp://"):
            host, _, port = address.removeprefix("tcp://").rpartition(":")
            # Heartbeats use the next port, and the coordinator of replicas in lockstep uses the one after that.
            count = 3 if options.in_lockstep and replica == 0 else 2
            ports += [_Port("step_addresses", "--step-addresses", host, int(port) + i) for i in range(count)]
    return ports


def _suggestion(options: Options, taken: _Port) -> str:
    """A value that would work, for options that are a single number."""
    if taken.option == "port":
        return f", such as {_free_ports(taken.host, options.num_routers)}, or 0 for any free one"
    if taken.option == "http_port":
        return f", such as {_free_ports(taken.host, options.num_routers)}, or 0 for none"
    if taken.option == "metrics_port":
        for base in range(options.metrics_port + 10, 60_000, 10):
            if are_free(taken.host, base, options.num_processes):
                return f", such as {base}, or 0 for none"
    return ""


def _bind_error(host: str, port: int) -> OSError | None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            _bare(host), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # A predecessor's connections in TIME_WAIT are fine; a listener is not.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error
    return None


def _free_ports(host: str, count: int) -> int:
    """The first of `count` free ports in a row. Raises ClusterError."""
    for _ in range(_MOST_TRIES):
        first = random.choice(_CHOSEN)
        if are_free(host, first, count):
            return first
    raise ClusterError(f"num_routers={count}: could not find {count} free ports in a row at {host}")


def are_free(host: str, first: int, count: int) -> bool:
    """True if nothing listens at any of the `count` ports from `first`."""
    return all(_bind_error(host, first + i) is None for i in range(count))


def _bare(host: str) -> str:
    """Strips the brackets of an IPv6 address."""
    return host.strip("[]")


def _show(value: object) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


@contextmanager
def claimed_ports(options: Options) -> Iterator[None]:
    """Claims the ports that processes of one router share, so that no other `octavo up` can share them.

    The claim lasts until the block or the process ends. Raises ClusterError.

    A claim is a socket with an abstract name: such names belong to the same network namespace as ports and leave
    nothing behind. A socket bound to the port itself would not work: a recently used port needs SO_REUSEADDR, and with
    that, two sockets can be bound to it as long as neither listens.
    """
    with ExitStack() as claims:
        if options.api_server_count > 1:
            if sys.platform != "linux":
                raise ClusterError(
                    f"api_server_count={options.api_server_count} needs Linux, which distributes connections over "
                    "processes that share a port; use num_routers instead"
                )
            for router in range(options.num_routers):
                _claim(claims, "port", options.router_port(router))
                if options.http_port:
                    _claim(claims, "http_port", options.router_http_port(router))
        yield


def _claim(claims: ExitStack, option: str, port: int) -> None:
    claim = claims.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    try:
        claim.bind(f"\0octavo/port/{port}")
    except OSError as error:
        raise ClusterError(
            f"{option}: port {port} is shared by the routers of another `octavo up` with api_server_count "
            f"({error.strerror}); stop that one, or choose another port"
        ) from None
