"""Checks, before anything starts, that the ports of a cluster are free.

A bind that fails later would show up as a process that dies again and again. And gRPC's servers set SO_REUSEPORT, so
two routers could silently share one port.
"""

import errno
import socket
from dataclasses import dataclass

from configs.options import Options
from octavo.cluster.errors import ClusterError


@dataclass(frozen=True, slots=True)
class _Port:
    option: str
    flag: str
    host: str
    port: int


def resolve_ports(options: Options) -> Options:
    """The options with port=0 replaced by a free port. Raises ClusterError, naming the option, if a port is taken."""
    if options.port == 0:
        options = options.model_copy(update={"port": _free_port(options.host)})
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
    ports = [_Port("port", "--port", options.host, options.port)]
    if options.http_port:
        ports.append(_Port("http_port", "--http-port", options.host, options.http_port))
    if options.metrics_port:
        last = options.process_metrics_port("worker", options.data_parallel_size - 1, options.world_size - 1)
        ports += [
            _Port("metrics_port", "--metrics-port", options.metrics_host, port)
            for port in range(options.metrics_port, last + 1)
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
        return f", such as {_free_port(taken.host)}, or 0 for any free one"
    if taken.option == "http_port":
        return f", such as {_free_port(taken.host)}, or 0 for none"
    if taken.option == "metrics_port":
        count = 1 + options.data_parallel_size * (1 + options.world_size)
        for base in range(options.metrics_port + 10, 60_000, 10):
            if all(_bind_error(taken.host, base + i) is None for i in range(count)):
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


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((_bare(host), 0))
        return probe.getsockname()[1]


def _bare(host: str) -> str:
    """Without the brackets of an IPv6 address."""
    return host.strip("[]")


def _show(value: object) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)
