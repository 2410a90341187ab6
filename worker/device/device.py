"""The interface to a GPU beyond tensors: pinned memory, events, graphs, and memory statistics.

A CPU on which Triton interprets its kernels (TRITON_INTERPRET=1) can stand in for a GPU. It computes each operation
immediately, in the order that a GPU's stream would keep.
"""

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, Self

import torch

_log = logging.getLogger("octavo.worker")


# _CudaEvent has most of it from torch.
class Event(Protocol):
    """A point in the device's queue of work."""

    def record(self) -> None:
        """Places the event after all work queued so far."""
        ...

    def query(self) -> bool:
        """Returns True once the device has reached the event."""
        ...

    def synchronize(self) -> None:
        """Waits until the device has reached the event. Releases the GIL while it waits."""
        ...

    def seconds_since(self, earlier: Self) -> float:
        """The device's time from the earlier event to this one. Both must have been reached."""
        ...


class Graph(Protocol):
    """Captured work; each replay uses the same memory addresses."""

    def replay(self) -> None: ...


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of the whole device in bytes, other processes included."""

    total: int
    # Measured after this process has returned its unused cached memory.
    free: int
    # This process's tensors, and the memory reserved for them, with gaps.
    allocated: int = 0
    reserved: int = 0


class Device(Protocol):
    """One worker's device. All work goes to one stream, in order."""

    torch_device: torch.device
    # The product name, such as NVIDIA H200.
    name: str

    def current(self) -> AbstractContextManager[object]:
        """Within the block, the calling thread's work goes to this device and its stream. A thread that has not entered
        it works on the first GPU's default stream, unordered with that of others."""
        ...

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Allocates uint8 host memory for asynchronous copies from and to the device."""
        ...

    def event(self) -> Event: ...

    def synchronize(self) -> None:
        """Waits for all work on the device."""
        ...

    def capture(self, body: Callable[[], object], pool: object | None) -> Graph:
        """Captures the device work of `body` without executing it. Run `body` once before: first-time compilation and
        allocation can't be captured. pool: from `graph_pool`; graphs of one pool share memory."""
        ...

    def capture_pieces(self, body: Callable[[], object], pool: object | None) -> Graph:
        """Captures like `capture`, but in pieces: each call that `body` makes through `between_graphs` ends one graph
        and begins the next, and a replay makes the call again. A tensor that one piece passes to a later piece or to a
        call keeps its memory only if `body` still holds it there."""
        ...

    def between_graphs(self, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Makes the call and returns its result. During `capture_pieces` the call becomes part of the replay; its
        result must be in the same memory each time."""
        ...

    def graph_pool(self) -> object: ...

    def memory(self) -> DeviceMemory: ...

    def peak_bytes(self, body: Callable[[], None]) -> int:
        """Runs `body`. Returns the most bytes that it had allocated at once, beyond those allocated before."""
        ...


class CudaDevice:
    """A GPU driven by CUDA."""

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device("cuda", index)
        self.name = torch.cuda.get_device_name(self.torch_device)
        torch.cuda.set_device(self.torch_device)
        # Graphs cannot be captured on the default stream.
        self._stream = torch.cuda.Stream(self.torch_device)
        # The caller's thread makes weights and memory; steps enter `current`, whichever thread computes them.
        torch.cuda.set_stream(self._stream)
        self._pieces: _CapturedPieces | None = None
        # cuBLAS may otherwise add up parts of K in 16 bits.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False

    def current(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def event(self) -> Event:
        # blocking: a waiting thread sleeps instead of spinning on a core that prepares the next step.
        return _CudaEvent(enable_timing=True, blocking=True)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def capture(self, body: Callable[[], object], pool: object | None) -> Graph:
        graph = _begin_capture(pool)
        try:
            body()
        except BaseException:
            _abandon(graph)
            raise
        graph.capture_end()
        return graph

    def capture_pieces(self, body: Callable[[], object], pool: object | None) -> Graph:
        self._pieces = pieces = _CapturedPieces(pool)
        try:
            body()
            pieces.end()
        except BaseException:
            pieces.abandon()
            raise
        finally:
            self._pieces = None
        return pieces

    def between_graphs(self, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        return call() if self._pieces is None else self._pieces.cut(call)

    def graph_pool(self) -> object:
        return torch.cuda.graph_pool_handle()

    def memory(self) -> DeviceMemory:
        self.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return DeviceMemory(
            total=total,
            free=free,
            allocated=torch.cuda.memory_allocated(self.torch_device),
            reserved=torch.cuda.memory_reserved(self.torch_device),
        )

    def peak_bytes(self, body: Callable[[], None]) -> int:
        self.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        before = torch.cuda.memory_allocated(self.torch_device)
        body()
        self.synchronize()
        return torch.cuda.max_memory_allocated(self.torch_device) - before


class _CudaEvent(torch.cuda.Event):
    def synchronize(self) -> None:
        # A new thread starts with GPU 0 as current. If the event is on another GPU, a call might create a context on
        # GPU 0, which takes hundreds of MiB.
        with torch.cuda.device(self.device):
            super().synchronize()

    def seconds_since(self, earlier: Self) -> float:
        return earlier.elapsed_time(self) / 1e3


def _begin_capture(pool: object | None) -> torch.cuda.CUDAGraph:
    """Begins a capture on the current stream, until capture_end. torch.cuda.graph would synchronize and empty the
    allocator's cache each time, and a model in pieces has some 30 graphs per size. thread_local: CUDA calls of other
    threads meanwhile do not invalidate the capture."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # pyright: ignore[reportArgumentType]
    return graph


def _abandon(graph: torch.cuda.CUDAGraph) -> None:
    """Ends a capture whose body has failed. That error is the cause; ending the capture often fails because of it."""
    try:
        graph.capture_end()
    except RuntimeError as error:
        _log.debug("ending a failed capture: %s", error)


class _CapturedPieces:
    """Graphs, and the calls between them, in order."""

    def __init__(self, pool: object | None) -> None:
        self._pool = pool
        self._parts: list[Callable[[], object]] = []
        # None: no capture is running.
        self._graph: torch.cuda.CUDAGraph | None = _begin_capture(pool)

    def cut(self, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        self.end()
        # The numbers are meaningless during a capture; the next graph is captured with the result's address.
        result = call()
        self._parts.append(call)
        self._graph = _begin_capture(self._pool)
        return result

    def end(self) -> None:
        assert self._graph is not None
        graph, self._graph = self._graph, None
        graph.capture_end()
        self._parts.append(graph.replay)

    def abandon(self) -> None:
        if self._graph is not None:
            _abandon(self._graph)

    def replay(self) -> None:
        for part in self._parts:
            part()


class InterpretedDevice:
    """A CPU with Triton's interpreter. memory_bytes: the total and free memory that it reports."""

    def __init__(self, memory_bytes: int = 1 << 30) -> None:
        self.torch_device = torch.device("cpu")
        self.name = "interpreted"
        self._memory_bytes = memory_bytes

    def current(self) -> AbstractContextManager[object]:
        return nullcontext()

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def event(self) -> Event:
        return _PassedEvent()

    def synchronize(self) -> None:
        """Returns at once: work is never pending."""

    def capture(self, body: Callable[[], object], pool: object | None) -> Graph:
        return _Repetition(body)

    def capture_pieces(self, body: Callable[[], object], pool: object | None) -> Graph:
        return _Repetition(body)

    def between_graphs(self, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        return call()

    def graph_pool(self) -> object:
        return object()

    def memory(self) -> DeviceMemory:
        return DeviceMemory(total=self._memory_bytes, free=self._memory_bytes)

    def peak_bytes(self, body: Callable[[], None]) -> int:
        body()
        return 0


class _PassedEvent:
    def __init__(self) -> None:
        self._time = 0.0

    def record(self) -> None:
        self._time = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def seconds_since(self, earlier: Self) -> float:
        return self._time - earlier._time


@dataclass(frozen=True, slots=True)
class _Repetition:
    """A stand-in for a graph: a replay runs the work again, in the same memory."""

    body: Callable[[], object]

    def replay(self) -> None:
        self.body()
