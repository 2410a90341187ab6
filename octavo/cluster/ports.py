"""Checks before anything starts that a cluster's ports are free, and claims those that several processes share.

A bind that fails later would show up as a process that dies again and again. And gRPC's servers set SO_REUSEPORT, so
two routers, or two clusters, could silently share one port.
"""

import errno
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from configs.options import Options
from octavo.cluster.errors import ClusterError

# For ports in a row: some of those that the system gives have a neighbour.
_MOST_TRIES = 100


@dataclass(frozen=True, slots=True)
class _Port:
    option: str
    flag: str
    host: str
    port: int


def resolve_ports(options: Options) -> Options:
    """The options with port=0 replaced by a free port, with free ones after it for further routers.

    Raises ClusterError, naming the option, if a port is taken.
    """
    if options.port == 0:
        options = options.model_copy(update={"port": _free_ports(options.host, options.num_routers)})
    for each in _ports(options):
        error = _bind_error(each.host, each.port)
        if error is None:
            continue
        value = getattr(options, each.option)
        if error.errno == errno.EADDRINUSE:
            raise ClusterError(
                f"{each.option}={_show(value)}: port {each.port} of {each.host} is in use; stop what listens there, or "
                f"give another with {each.flag}{_suggestion(options, each)}"
            )
        raise ClusterError(f"{each.option}={_show(value)}: cannot listen on {each.host}:{each.port}: {error.strerror}")
    return options


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
            # Heartbeats use the next one, and the coordinator of replicas in lockstep the one after that.
            count = 3 if options.in_lockstep and replica == 0 else 2
            ports += [_Port("step_addresses", "--step-addresses", host, int(port) + i) for i in range(count)]
    return ports


def _suggestion(options: Options, taken: _Port) -> str:
    """A value that would work, for the options that are one number."""
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
    """The first of so many in a row. Raises ClusterError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for _ in range(_MOST_TRIES):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((_bare(host), 0))
            first: int = probe.getsockname()[1]
        if first + count <= 65_536 and are_free(host, first, count):
            return first
    raise ClusterError(f"num_routers={count}: found no {count} free ports in a row at {host}")


def are_free(host: str, first: int, count: int) -> bool:
    """Nothing listens at any of the ports."""
    return all(_bind_error(host, first + i) is None for i in range(count))


def _bare(host: str) -> str:
    """Without the brackets of an IPv6 address."""
    return host.strip("[]")


def _show(value: object) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


@contextmanager
def claimed_ports(options: Options) -> Iterator[None]:
    """Lets no other `octavo up` share the ports that this one's routers share among their processes, until the block
    ends, or the process does. Raises ClusterError.

    A claim is a socket with an abstract name. Such names belong to the same network namespace as ports do, and leave
    nothing behind. A socket that is bound to the port itself would not do: with SO_REUSEADDR, which a port needs that
    was in use a minute ago, two can be bound to it as long as neither listens.
    """
    with ExitStack() as claims:
        if options.api_server_count > 1:
            if sys.platform != "linux":
                raise ClusterError(
                    f"api_server_count={options.api_server_count} needs Linux, which deals connections out to the "
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
