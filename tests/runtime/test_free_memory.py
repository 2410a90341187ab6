"""runtime.free_memory: what malloc keeps of a burst goes back to the system."""

import subprocess
import sys

import pytest

from runtime import free_memory

_MIB = 2**20
# Every fourth small block lives on, so that none of the pages between is at the heap's end.
_BURST = """
from runtime import free_memory
giver = free_memory._Giver()
blocks = [bytes(3_000) for _ in range(60_000)]
grown = free_memory.resident_bytes()
del blocks[:-1:2]
del blocks[:-1:2]
giver.look()
print(grown, free_memory.resident_bytes(), giver.wait_s)
"""


@pytest.mark.skipif(not free_memory.resident_bytes(), reason="the system does not say how large a process is")
def test_what_a_burst_left_goes_back() -> None:
    printed = subprocess.run([sys.executable, "-c", _BURST], capture_output=True, text=True, check=True).stdout.split()
    grown, left, wait_s = int(printed[0]), int(printed[1]), float(printed[2])
    assert grown - left > 60 * _MIB
    assert wait_s == 10


def test_a_process_that_is_large_for_a_reason_is_looked_at_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, num_given = iter([100, 104, 200, 199, 200, 199, 200, 199, 200, 120, 101]), []
    monkeypatch.setattr(free_memory, "resident_bytes", lambda: next(sizes))
    monkeypatch.setattr(free_memory, "give_back_free_memory", lambda: num_given.append(1))
    giver, waits = free_memory._Giver(), []
    for _ in range(6):
        giver.look()
        waits.append(giver.wait_s)
    assert waits == [10, 20, 40, 40, 10, 10]
    assert len(num_given) == 4
