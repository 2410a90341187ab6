"""Limits of open files and of processes."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import psutil

from kernels.native.cores import control_groups
from octavo.doctor.check import Check, note, ok, problem
from octavo.doctor.machine import Machine

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
