"""Finds accesses to memory that streams and events do not order.

    with checked_streams() as checker:
        device = checker.device()
        ...

Within the block, torch.cuda's streams and events are stand-ins, and Triton interprets kernels. Work runs at once, but
an access fails if on a GPU nothing would have it wait for the last access by another stream, or by a host thread that
touches the same memory. Each stream and each thread has a vector clock (Mattern 1989): its own number of accesses, and
those of the others that happened before. Threads pass nothing on to each other but for what they do themselves, so work
on the device has to be ordered there. Kernels' addresses are those that the interpreter loads and stores, torch's those
of its arguments.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpreterBuilder

from worker.device.device import Event, InterpretedDevice
from worker.device.staging import Staging, StepSlot
from worker.gpu.pending import ResultLayout

# Memory is watched in pieces of so many bytes, in pages of so many pieces.
_PIECE, _PAGE = 16, 256
_MOST_ACTORS = 16
_WITHOUT_CONTENT = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}

Clock = np.ndarray  # int64 [actors]


class UnorderedError(AssertionError):
    """An access that nothing orders after another one."""


class _Page:
    def __init__(self) -> None:
        self.writers = np.zeros(_PAGE, np.int64)
        self.written = np.zeros(_PAGE, np.int64)
        # The last read by each actor since then.
        self.read = np.zeros((_MOST_ACTORS, _PAGE), np.int64)


class FakeStream:
    def __init__(self, checker: "StreamChecker", name: str) -> None:
        self._checker, self.name = checker, name
        self.actor = checker.new_actor(name)
        self.clock: Clock = np.zeros(_MOST_ACTORS, np.int64)

    def wait_stream(self, other: "FakeStream") -> None:
        self.clock = np.maximum(self.clock, other.clock)

    def record_event(self, event: "FakeEvent") -> None:
        event.clock = self.clock.copy()


class FakeEvent:
    """Reached as soon as a host thread knows that it is, by waiting: the latest that it may be."""

    def __init__(self, checker: "StreamChecker") -> None:
        self._checker = checker
        self.clock: Clock | None = None

    def record(self) -> None:
        self._checker.current_stream().record_event(self)

    def wait(self) -> None:
        assert self.clock is not None
        stream = self._checker.current_stream()
        stream.clock = np.maximum(stream.clock, self.clock)

    def query(self) -> bool:
        return self.clock is None or bool((self._checker.host().clock >= self.clock).all())

    def synchronize(self) -> None:
        if self.clock is not None:
            host = self._checker.host()
            host.clock = np.maximum(host.clock, self.clock)

    def seconds_since(self, earlier: Self) -> float:
        return 0.25


class _Device(InterpretedDevice):
    """A device with a stream of its own, as CudaDevice has."""

    def __init__(self, checker: "StreamChecker") -> None:
        super().__init__()
        self._checker, self._stream = checker, checker.new_stream()
        checker.set_stream(self._stream)

    def current(self) -> AbstractContextManager[object]:
        return self._checker.stream(self._stream)

    def event(self) -> Event:
        return FakeEvent(self._checker)

    def synchronize(self) -> None:
        self._checker.synchronize()


class StreamChecker:
    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._names: list[str] = []
        self._threads: list[FakeStream] = []
        self._pages: defaultdict[int, _Page] = defaultdict(_Page)
        self._streams: list[FakeStream] = []
        self._default = self.new_stream("the default stream")
        self._local = threading.local()
        # Accesses that were checked, by the name of their stream.
        self.num_accesses: defaultdict[str, int] = defaultdict(int)

    def device(self) -> InterpretedDevice:
        """Makes a device. Its stream is current on this thread from now on."""
        return _Device(self)

    def new_actor(self, name: str) -> int:
        assert len(self._names) < _MOST_ACTORS
        self._names.append(name)
        return len(self._names) - 1

    def new_stream(self, name: str | None = None) -> FakeStream:
        self._streams.append(FakeStream(self, name or f"stream {len(self._streams)}"))
        return self._streams[-1]

    def current_stream(self) -> FakeStream:
        return getattr(self._local, "stream", self._default)

    def set_stream(self, stream: FakeStream) -> None:
        self._local.stream = stream

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before = self.current_stream()
        self.set_stream(stream)
        yield
        self.set_stream(before)

    def host(self) -> FakeStream:
        """The calling thread, which orders its own accesses as a stream does."""
        if not hasattr(self._local, "host"):
            self._local.host = FakeStream(self, f"thread {threading.current_thread().name}")
            self._threads.append(self._local.host)
        return self._local.host

    def synchronize(self) -> None:
        host = self.host()
        for stream in self._streams:
            host.clock = np.maximum(host.clock, stream.clock)

    def work(self, pieces: np.ndarray, *, writes: bool) -> None:
        """The current stream accesses pieces of memory, after all that the thread has waited for."""
        with self._lock:
            stream = self.current_stream()
            stream.clock = np.maximum(stream.clock, self.host().clock)
            self._access(stream, pieces, writes=writes)

    def by_host(self, tensor: torch.Tensor, *, writes: bool) -> None:
        """The calling thread itself accesses the tensor's memory."""
        with self._lock:
            self._access(self.host(), pieces_of(tensor), writes=writes)

    def _access(self, actor: FakeStream, pieces: np.ndarray, *, writes: bool) -> None:
        if not len(pieces):
            return
        me, clock = actor.actor, actor.clock
        clock[me] += 1
        now = int(clock[me])
        if actor in self._threads:
            # Threads order what they do themselves by locks and queues, and tell each other what they have waited for.
            clock = np.max([each.clock for each in self._threads], axis=0)
        self.num_accesses[actor.name] += 1
        for number in np.unique(pieces // _PAGE).tolist():
            page = self._pages[number]
            at = pieces[pieces // _PAGE == number] % _PAGE
            late = page.written[at] > clock[page.writers[at]]
            if late.any():
                self._refuse(actor, "writes" if writes else "reads", int(page.writers[at][late][0]), "wrote")
            if writes:
                readers = np.flatnonzero((page.read[:, at] > clock[:, None]).any(1))
                if len(readers):
                    self._refuse(actor, "writes", int(readers[0]), "reads")
                page.writers[at], page.written[at] = me, now
                page.read[:, at] = 0
            else:
                page.read[me, at] = now

    def _refuse(self, actor: FakeStream, does: str, other: int, did: str) -> None:
        raise UnorderedError(f"{actor.name} {does} what {self._names[other]} {did}, and nothing orders the two")


def pieces_of(tensor: torch.Tensor) -> np.ndarray:
    """The pieces of memory that a tensor's numbers lie in."""
    offsets = np.zeros(1, np.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = (offsets[:, None] + np.arange(size) * stride).reshape(-1)
    return _pieces(tensor.data_ptr() + offsets * tensor.itemsize)


def _pieces(addresses: np.ndarray) -> np.ndarray:
    return np.unique(addresses.astype(np.int64) // _PIECE)


class _TorchWork(TorchDispatchMode):
    def __init__(self, checker: StreamChecker) -> None:
        super().__init__()
        self._checker = checker

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs, schema = kwargs or {}, func._schema
        outputs = func(*args, **kwargs)
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
        if is_view or func.overloadpacket.__name__ in _WITHOUT_CONTENT:
            return outputs
        given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
        written = {each.name for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write}
        for writes in (False, True):
            values = [value for name, value in given.items() if (name in written) is writes]
            for leaf in tree_leaves([*values, outputs] if writes else values):
                if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                    self._checker.work(pieces_of(leaf), writes=writes)
        return outputs


@contextmanager
def checked_streams() -> Iterator[StreamChecker]:
    """Yields the checker of this thread's work, and of threads that are started within the block."""
    checker = StreamChecker()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    add, run = InterpreterBuilder.create_atomic_rmw, threading.Thread.run
    next_slot, outputs = Staging.next, ResultLayout.outputs

    def work(pointers: Any, mask: Any, *, writes: bool) -> None:
        inside = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]
        checker.work(_pieces(inside), writes=writes)

    def loading(self: Any, ptrs: Any, mask: Any, *args: Any) -> Any:
        work(ptrs, mask, writes=False)
        return load(self, ptrs, mask, *args)

    def storing(self: Any, ptrs: Any, value: Any, mask: Any, *args: Any) -> Any:
        work(ptrs, mask, writes=True)
        return store(self, ptrs, value, mask, *args)

    def adding(self: Any, op: Any, ptr: Any, value: Any, mask: Any, *args: Any) -> Any:
        work(ptr, mask, writes=True)
        return add(self, op, ptr, value, mask, *args)

    def running(self: threading.Thread) -> None:
        with _TorchWork(checker):
            run(self)

    def filling(self: Staging) -> StepSlot:
        slot = next_slot(self)
        checker.by_host(slot._inputs, writes=True)
        return slot

    def reading(self: ResultLayout, results: np.ndarray, seconds: float) -> Any:
        checker.by_host(torch.from_numpy(results), writes=False)
        return outputs(self, results, seconds)

    patches: list[tuple[object, str, Callable[..., Any]]] = [
        (InterpreterBuilder, "create_masked_load", loading),
        (InterpreterBuilder, "create_masked_store", storing),
        (InterpreterBuilder, "create_atomic_rmw", adding),
        (threading.Thread, "run", running),
        (Staging, "next", filling),
        (ResultLayout, "outputs", reading),
        (torch.cuda, "Stream", lambda device=None: checker.new_stream()),
        (torch.cuda, "Event", lambda **how: FakeEvent(checker)),
        (torch.cuda, "current_stream", lambda device=None: checker.current_stream()),
        (torch.cuda, "stream", checker.stream),
    ]
    with pytest.MonkeyPatch.context() as patch, _TorchWork(checker):
        for owner, name, value in patches:
            patch.setattr(owner, name, value)
        yield checker
