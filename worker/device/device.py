"""What a worker needs of a GPU beyond tensors: pinned memory, events, graphs, and how much memory there is.

A CPU on which Triton interprets its kernels (TRITON_INTERPRET=1) stands in for one: it computes at once whatever it is
given, which is the order that a GPU's stream keeps.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

import torch


class Event(Protocol):
    """A place in the order of what the device was given."""

    def record(self) -> None:
        """Here, after all that was given so far."""
        ...

    def query(self) -> bool:
        """Whether the device has got there."""
        ...

    def synchronize(self) -> None:
        """Waits until it has, without keeping the interpreter's lock."""
        ...

    def seconds_since(self, earlier: Self) -> float:
        """What the device took from there to here. Both have been reached."""
        ...


class Graph(Protocol):
    """Work that was captured once; its memory is the same in each replay."""

    def replay(self) -> None: ...


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes, of the device as a whole: other processes' count."""

    total: int
    # What this process holds without need is given back first.
    free: int
    # Of this process: its tensors, and the memory that they lie in, with gaps.
    allocated: int = 0
    reserved: int = 0


class Device(Protocol):
    """One worker's. All work goes to one stream, in order."""

    torch_device: torch.device
    # Of its kind, such as NVIDIA H200.
    name: str

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """uint8 host memory that the device copies from and to while the host goes on."""
        ...

    def event(self) -> Event: ...

    def synchronize(self) -> None:
        """Waits for all work."""
        ...

    def capture(self, body: Callable[[], object], pool: object | None) -> Graph:
        """What `body` gives the device, without doing it. Run it once before: what is compiled or allocated for the
        first time cannot be captured. pool: of `graph_pool`, for memory shared with other graphs of it."""
        ...

    def capture_pieces(self, body: Callable[[], object], pool: object | None) -> Graph:
        """As `capture`, but for the calls that `body` makes by `between_graphs`: one graph ends there, and the next
        begins. A replay makes these calls anew. What one piece leaves for a later one, or for a call, stays in place
        as long as `body` itself still holds it there."""
        ...

    def between_graphs(self, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What it gives. While pieces are captured, each replay calls it in this place, too; what it gives has to be in
        the same memory each time."""
        ...

    def graph_pool(self) -> object: ...

    def memory(self) -> DeviceMemory: ...

    def peak_bytes(self, body: Callable[[], None]) -> int:
        """The most that `body` has allocated at once, beyond what was there before."""
        ...


class CudaDevice:
    """A GPU by CUDA."""

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device("cuda", index)
        self.name = torch.cuda.get_device_name(self.torch_device)
        torch.cuda.set_device(self.torch_device)
        # Graphs cannot be captured on the default stream.
        self._stream = torch.cuda.Stream(self.torch_device)
        torch.cuda.set_stream(self._stream)
        self._pieces: _CapturedPieces | None = None

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def event(self) -> Event:
        # blocking: a waiting thread sleeps, rather than spin on a core that the next step's preparation needs.
        return _CudaEvent(enable_timing=True, blocking=True)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def capture(self, body: Callable[[], object], pool: object | None) -> Graph:
        graph = _begin_capture(pool)
        try:
            body()
        finally:
            graph.capture_end()
        return graph

    def capture_pieces(self, body: Callable[[], object], pool: object | None) -> Graph:
        self._pieces = pieces = _CapturedPieces(pool)
        try:
            body()
        finally:
            self._pieces = None
            pieces.end()
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
        # A thread begins with GPU 0. Were this one's another, a call there might make a context on that, which takes
        # hundreds of MiB.
        with torch.cuda.device(self.device):
            super().synchronize()

    def seconds_since(self, earlier: Self) -> float:
        return earlier.elapsed_time(self) / 1e3


def _begin_capture(pool: object | None) -> torch.cuda.CUDAGraph:
    """On the current stream, until capture_end. torch.cuda.graph would wait for the device and empty the caches of its
    memory each time: a model's pieces are some 30 graphs a size. thread_local: what other threads ask of CUDA meanwhile
    does not spoil it."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # pyright: ignore[reportArgumentType]
    return graph


class _CapturedPieces:
    """Graphs, and what is called between them."""

    def __init__(self, pool: object | None) -> None:
        self._pool = pool
        self._parts: list[Callable[[], object]] = []
        self._graph = _begin_capture(pool)

    def cut(self, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        self.end()
        # Of what the memory holds at the moment; it is the place of the result that the next graph is captured with.
        result = call()
        self._parts.append(call)
        self._graph = _begin_capture(self._pool)
        return result

    def end(self) -> None:
        self._graph.capture_end()
        self._parts.append(self._graph.replay)

    def replay(self) -> None:
        for part in self._parts:
            part()


class InterpretedDevice:
    """A CPU with Triton's interpreter. memory_bytes: what it says it has."""

    def __init__(self, memory_bytes: int = 1 << 30) -> None:
        self.torch_device = torch.device("cpu")
        self.name = "interpreted"
        self._memory_bytes = memory_bytes

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def event(self) -> Event:
        return _PassedEvent()

    def synchronize(self) -> None:
        """Nothing is ever under way."""

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
    """A graph of a CPU: the work itself, done again with the same memory."""

    body: Callable[[], object]

    def replay(self) -> None:
        self.body()
