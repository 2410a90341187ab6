"""The clock: how it is read, and if it is set."""

import ctypes
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from octavo.doctor.check import Check, note, ok
from octavo.doctor.machine import Machine

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
