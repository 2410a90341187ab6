"""The cores that this process may use, and the workers that share them."""

import os
from collections.abc import Iterator

from kernels.native.cores import control_groups, cpu_quota, usable_cores
from octavo.doctor.check import Check, note, ok
from octavo.doctor.machine import Machine


def check_cores(machine: Machine) -> Iterator[Check]:
    """Compares the cores with the workers and their threads."""
    cores, quota, usable = len(usable_cores()), cpu_quota(control_groups("cpu")), machine.num_cores
    there = f"{cores} of {os.cpu_count()} cores" if cores != os.cpu_count() else f"{cores} cores"
    limit = "no CPU quota" if quota is None else f"a CPU quota of {quota:g} cores"
    workers, options = machine.num_workers, machine.options
    if machine.on_gpu:
        yield ok("cores", f"{there}, {limit}")
        return
    threads = options.worker_threads or max(1, usable // workers)
    found = f"{there}, {limit}; {workers} worker{'s' * (workers > 1)} with {threads} thread{'s' * (threads > 1)} each"
    if workers * threads > usable:
        advice = (
            f"use at most {usable} workers" if workers > usable else f"use worker_threads={max(1, usable // workers)}"
        )
        yield note(
            "cores", f"{found}: more threads than the {usable} that can compute at once", f"{advice}, or more cores"
        )
    else:
        yield ok("cores", found)
