"""Limits of the system: open files, processes, ports, the runtime directory, and the clock."""

import ctypes
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from kernels.native.cores import control_groups
from octavo.cluster.errors import ClusterError
from octavo.cluster.ports import ports_by_option, unusable_ports, with_port
from octavo.cluster.runtime_files import locked_runtime_dir
from octavo.doctor.machine import Check, Machine, note, ok, problem

# Open in an idle scheduler, the most of all processes; measured with one worker: 33. The rest is for loading.
_FILES_TO_START = 128
# Threads of an idle process, measured: launcher 19, scheduler 14, router 9, worker 5 and one for each core.
_THREADS = 20


def check_open_files(machine: Machine) -> Iterator[Check]:
    """Compares RLIMIT_NOFILE with what a router needs if each stream has a connection of its own.

    The hard limit counts: each process raises its own to that.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        yield ok("open files", "no limit")
        return
    options = machine.options
    needed = _FILES_TO_START + 4 * options.num_processes
    wanted = needed + options.max_streams
    advice = (
        f"raise the hard limit of {hard} to {wanted} (as root in /etc/security/limits.conf; LimitNOFILE= in a systemd "
        "unit, --ulimit nofile= of a container)"
    )
    if hard < needed:
        yield problem("open files", f"at most {hard} a process; a process of this cluster needs {needed}", advice)
    elif hard < wanted:
        found = (
            f"at most {hard} a process: a router can hold {hard - needed} connections, fewer than its "
            f"max_streams={options.max_streams}"
        )
        yield note("open files", found, advice)
    else:
        raised = f" (each raises its limit from {soft})" if soft < hard else ""
        yield ok("open files", f"at most {hard} a process{raised}")


def check_processes(machine: Machine) -> Iterator[Check]:
    """Compares the limits of processes, which count threads, with the threads of a cluster."""
    needed = _THREADS * (machine.options.num_processes + 1) + machine.num_cores
    left = [(limit - used, f"{limit} ({of})") for limit, used, of in _limits()]
    if not left:
        yield ok("processes", "no limit")
        return
    room, limit = min(left)
    if room < needed:
        found = f"at most {limit}, which leaves {max(0, room)} threads; this cluster takes about {needed}"
        advice = "raise it: ulimit -u, LimitNPROC= and TasksMax= in a systemd unit, --pids-limit of a container"
        yield problem("processes", found, advice)
    else:
        yield ok("processes", f"at most {limit}, {room} are left; this cluster takes about {needed}")


def _limits() -> Iterator[tuple[int, int, str]]:
    """Each limit with what is used of it and its name."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    # The kernel does not hold root to it.
    if soft != resource.RLIM_INFINITY and os.getuid():
        used = sum(each.info["num_threads"] or 0 for each in _own_processes())
        yield soft, used, "of this user"
    for directory in control_groups("pids"):
        maximum, current = _number(directory / "pids.max"), _number(directory / "pids.current")
        if maximum is not None:
            yield maximum, current or 0, "of a control group"


def _own_processes() -> Iterator[psutil.Process]:
    for each in psutil.process_iter(["uids", "num_threads"]):
        if each.info["uids"] and each.info["uids"].real == os.getuid():
            yield each


def _number(file: Path) -> int | None:
    """Reads a control group's file; None if there is none, or it says "max"."""
    text = file.read_text().strip() if file.is_file() else "max"
    return None if text == "max" else int(text)


SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
_READS = 20_000
# Read with a system call and a device; tsc and kvm-clock take some 50 ns.
_SLOW_NS = 1000
# TIME_ERROR of adjtimex(2): nothing has set the clock.
_UNSYNCHRONIZED = 5


def check_clock(machine: Machine) -> Iterator[Check]:
    """Times a reading of the clock, and asks the kernel if something keeps it right."""
    source, cost = SOURCE.read_text().strip() if SOURCE.is_file() else "unknown", reading_ns()
    found = f"source {source}, {cost:.0f} ns a reading"
    if cost > _SLOW_NS:
        advice = (
            f"let the kernel use tsc or kvm-clock (it lists what it has in {SOURCE.with_name('available_clocksource')})"
        )
        yield note("clock", f"{found}: slow, and each step reads it often", advice)
    elif not is_synchronized():
        advice = "run chrony or systemd-timesyncd on the host; certificates, log times and traces need the time"
        yield note("clock", f"{found}; nothing keeps it synchronized", advice)
    else:
        yield ok("clock", f"{found}, synchronized")


def reading_ns() -> float:
    begun = time.perf_counter_ns()
    for _ in range(_READS):
        time.perf_counter_ns()
    return (time.perf_counter_ns() - begun) / _READS


def is_synchronized() -> bool:
    """Asks adjtimex(2), without a change; True where there is no such call."""
    if sys.platform != "linux":
        return True
    # struct timex has 208 bytes on 64-bit Linux; modes, its first member, is 0: read only.
    status = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(256))
    return status not in (-1, _UNSYNCHRONIZED)


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
