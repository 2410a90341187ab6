"""The kernels' threads: the cores they run on, and the replay of recorded calls."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels.backend import native_backend
from kernels.linear import PackedLinear
from kernels.native.library import NativeKernels, Op
from tests.support.kernels.kernel_paths import native


@pytest.fixture
def kernels() -> Iterator[NativeKernels]:
    kernels, cores = native(), os.sched_getaffinity(0)
    yield kernels
    kernels.set_threads(torch.get_num_threads())
    os.sched_setaffinity(0, cores)


def _layer(kernels: NativeKernels, num_outputs: int = 640) -> PackedLinear:
    weight = torch.randn(num_outputs, 96, generator=torch.Generator().manual_seed(0))
    return PackedLinear(weight, None, native_backend(torch.float32, kernels))


def _affinities() -> list[set[int]]:
    return [os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")]


def test_threads_are_bound_one_to_a_core(kernels: NativeKernels) -> None:
    """Runs on a thread of its own: the calling thread gets bound as well, and pytest's should stay free."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    layer, found = _layer(kernels), list[set[int]]()

    def bind_and_compute() -> None:
        kernels.set_threads(2)
        layer(torch.ones(64, 96))  # starts the pool
        kernels.bind_threads(cores)
        found.append(os.sched_getaffinity(0))
        found.extend(_affinities())
        layer(torch.ones(64, 96))

    thread = threading.Thread(target=bind_and_compute)
    thread.start()
    thread.join()
    assert found[0] == {cores[0]}
    assert {cores[-1]} in found[1:]


def test_a_core_that_does_not_exist_is_an_error(kernels: NativeKernels) -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        kernels.bind_threads([1023])


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_more_threads_than_cores_give_the_same_bits(threads: int, kernels: NativeKernels) -> None:
    """Runs of tasks are dealt to threads that may not get a core; threads that do take them over."""
    layer, x = _layer(kernels), torch.randn(33, 96, generator=torch.Generator().manual_seed(1))
    expected = layer(x)
    kernels.set_threads(threads)
    for _ in range(50):
        assert torch.equal(layer(x), expected)


def _ticks_of_other_threads() -> int:
    """CPU time of all threads but the calling one."""
    total = 0
    for thread in os.listdir("/proc/self/task"):
        if int(thread) != threading.get_native_id():
            fields = Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total


def test_threads_without_work_sleep(kernels: NativeKernels) -> None:
    layer, x = _layer(kernels), torch.ones(512, 96)
    kernels.set_threads(2)
    for _ in range(20):
        layer(x)
    # Threads that earlier tests have left may compute, but not all the time, as one that spins does.
    for _ in range(10):
        time.sleep(0.05)
        before = _ticks_of_other_threads()
        time.sleep(0.5)
        if _ticks_of_other_threads() - before < 0.1 * os.sysconf("SC_CLK_TCK"):
            return
    pytest.fail("threads took a tenth of a core or more each time")


def test_recorded_calls_compute_again_from_what_is_there_then(kernels: NativeKernels) -> None:
    """Replays use other numbers, and more or fewer rows."""
    first, second = _layer(kernels), _layer(kernels, 96)
    generator = torch.Generator().manual_seed(2)
    x, between, y = torch.zeros(9, 96), torch.empty(9, 96), torch.empty(9, 640)
    with kernels.recording() as recording:
        second(x[:2], out=between[:2])
        first(between[:2], out=y[:2])
    for num_rows in (9, 1, 4):
        x[:num_rows] = torch.randn(num_rows, 96, generator=generator)
        y.fill_(7)
        kernels.replay(recording, num_rows)
        assert torch.equal(y[:num_rows], first(second(x[:num_rows])))
        assert bool((y[num_rows:] == 7).all())


def test_a_recording_goes_on_with_fewer_tokens(kernels: NativeKernels) -> None:
    first, second = _layer(kernels, 96), _layer(kernels)
    x = torch.randn(9, 96, generator=torch.Generator().manual_seed(3))
    between, y, count = torch.empty(9, 96), torch.empty(9, 640), torch.tensor([2])
    with kernels.recording() as recording:
        first(x, out=between)
        kernels.go_on_with(count.data_ptr())
        second(between[:2], out=y[:2])
    for num_left in (5, 0, 1):
        count.fill_(num_left)
        between.fill_(7)
        y.fill_(7)
        kernels.replay(recording, 8)
        assert torch.equal(between[:8], first(x[:8]))
        assert torch.equal(y[:num_left], second(between[:num_left]))
        assert bool((y[num_left:] == 7).all())


def test_what_calls_take_is_counted_replayed_or_not(kernels: NativeKernels) -> None:
    layer, x, y = _layer(kernels), torch.ones(4, 96), torch.empty(4, 640)
    with kernels.recording() as recording:
        layer(x, out=y)
    kernels.replay(recording, 4)
    with kernels.measuring() as times:
        kernels.replay(recording, 4)
        replayed = times.of(Op.LINEAR)
        layer.argmax(x)
    assert 0 < replayed < times.of(Op.LINEAR)
    assert times.of(Op.ATTENTION) == 0
    assert len(times.seconds) == 1
