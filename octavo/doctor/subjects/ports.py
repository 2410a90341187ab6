"""The ports that the options name, and the directory of sockets between processes."""

from collections.abc import Iterator

import psutil

from octavo.cluster.errors import ClusterError
from octavo.cluster.ports import ports_by_option, unusable_ports, with_port
from octavo.cluster.runtime_files import locked_runtime_dir
from octavo.doctor.check import Check, ok, problem
from octavo.doctor.machine import Machine


def check_ports(machine: Machine) -> Iterator[Check]:
    """Tries to bind each port, and names the process that holds one."""
    options = with_port(machine.options)
    taken = list(unusable_ports(options))
    for each in taken:
        yield problem("ports", f"{each.option}: {each.found}{_holder(each.port)}", each.advice)
    if not taken:
        used = [f"{option} {_range(ports)}" for option, ports in ports_by_option(options).items()]
        yield ok("ports", f"free: {', '.join(used)}")


def check_runtime_directory(machine: Machine) -> Iterator[Check]:
    """Takes the directory's lock for a moment, as `octavo up` takes it for good."""
    directory = machine.options.runtime_dir
    try:
        with locked_runtime_dir(directory):
            yield ok("runtime directory", f"{directory} is private and not in use")
    except ClusterError as error:
        yield problem("runtime directory", str(error), "stop the other cluster, or name another with --runtime-dir")


def _range(ports: list[int]) -> str:
    is_run = len(ports) > 2 and ports == list(range(ports[0], ports[0] + len(ports)))
    return f"{ports[0]} to {ports[-1]}" if is_run else " and ".join(map(str, ports))


def _holder(port: int) -> str:
    """Names the process that listens at a port; empty where the system does not tell this user."""
    try:
        listening = psutil.net_connections("tcp")
    except psutil.AccessDenied:
        return ""
    for each in listening:
        if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port and each.pid:
            try:
                return f" by {' '.join(psutil.Process(each.pid).cmdline()[:4])} (pid {each.pid})"
            except psutil.Error:
                return f" by pid {each.pid}"
    return ""
