"""A device whose graphs are recorded calls of torch and Triton, with the limits of a GPU's graphs.

Python code in a capture runs once. A graph holds the addresses of memory, and host values only as they were at capture.
It keeps memory that was allocated in the capture, but not memory that was allocated before.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from triton.runtime.interpreter import InterpretedFunction

from worker.device.device import Graph, InterpretedDevice

_aten = torch.ops.aten
# Each of these waits for the GPU or copies a number from the host.
_HOST_READS = {_aten._local_scalar_dense, _aten.nonzero, _aten.masked_select, _aten.lift_fresh, _aten.equal}
_WITHOUT_CONTENT = {_aten.empty, _aten.empty_like, _aten.new_empty, _aten.empty_strided, _aten.new_empty_strided}


class GoneError(Exception):
    """A graph reads memory that has been given back since it was captured."""


@dataclass(frozen=True, slots=True)
class _Outside:
    """A tensor in memory that a graph doesn't keep."""

    storage: Any  # a weak reference
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    op: str

    def tensor(self) -> torch.Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage)
        if storage is None:
            raise GoneError(f"{self.op} reads {tuple(self.size)} {self.dtype}, which was there only when captured")
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], object]] = []
        # Storages by their identity.
        self._inside: dict[int, torch.UntypedStorage] = {}
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        assert func.overloadpacket not in _HOST_READS, f"{func} in a capture"
        masks = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor) and leaf.dtype is torch.bool]
        assert not masks or func.overloadpacket not in {_aten.index, _aten.index_put, _aten.index_put_}, "boolean index"
        given = self._kept((args, kwargs), str(func))
        outputs = func(*args, **kwargs)
        theirs = {_storage_id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        new = [
            leaf if isinstance(leaf, torch.Tensor) and _storage_id(leaf) not in theirs else None
            for leaf in tree_leaves(outputs)
        ]
        for leaf in new:
            if leaf is not None:
                self._inside[_storage_id(leaf)] = leaf.untyped_storage()
        if func.overloadpacket not in _WITHOUT_CONTENT:

            def again() -> None:
                args, kwargs = _found(given)
                for before, now in zip(new, tree_leaves(func(*args, **kwargs)), strict=True):
                    if before is not None:
                        before.copy_(now)

            self.calls.append(again)
        return outputs

    def launch(self, run: Callable[..., object], *args: object, **kwargs: object) -> None:
        with _disable_current_modes():
            given = self._kept((args, kwargs), str(getattr(args[0], "__name__", run)))

        def again() -> None:
            args, kwargs = _found(given)
            run(*args, **kwargs)

        with _disable_current_modes():
            run(*args, **kwargs)
        self.calls.append(again)

    def undo(self) -> None:
        """Undoes the computation, which a capture does not do: restores memory; the graph's own is as if unwritten."""
        for storage, copy in self._before.values():
            storage.copy_(copy)
        for storage in self._inside.values():
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF)

    def _kept(self, tree: object, op: str) -> Any:
        def keep(tensor: torch.Tensor) -> torch.Tensor | _Outside:
            storage, identity = tensor.untyped_storage(), _storage_id(tensor)
            if identity in self._inside:
                return tensor
            if identity not in self._before:
                self._before[identity] = (storage, storage.clone())
            return _Outside(
                storage._weak_ref(), tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset(), op
            )

        return tree_map_only(torch.Tensor, keep, tree)


def _storage_id(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _found(tree: Any) -> Any:
    return tree_map_only(_Outside, _Outside.tensor, tree)


@dataclass(frozen=True, slots=True)
class _Calls:
    calls: list[Callable[[], object]]

    def replay(self) -> None:
        with torch.inference_mode():
            for call in self.calls:
                call()


class RecordingDevice(InterpretedDevice):
    def __init__(self, memory_bytes: int = 1 << 30) -> None:
        super().__init__(memory_bytes)
        # The memory pool of each capture.
        self.pools: list[object | None] = []
        self._recorder: _Recorder | None = None
        self._cuts = False

    def capture(self, body: Callable[[], object], pool: object | None) -> Graph:
        return self._recorded(body, pool, cuts=False)

    def capture_pieces(self, body: Callable[[], object], pool: object | None) -> Graph:
        return self._recorded(body, pool, cuts=True)

    def between_graphs(self, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        if self._recorder is None or not self._cuts:
            return call()
        with _disable_current_modes(), _launches_pass(None):
            result = call()
        self._recorder.calls.append(call)
        return result

    def _recorded(self, body: Callable[[], object], pool: object | None, *, cuts: bool) -> Graph:
        self.pools.append(pool)
        recorder = _Recorder()
        self._recorder, self._cuts = recorder, cuts
        try:
            with _launches_pass(recorder), recorder:
                body()
        finally:
            self._recorder = None
        recorder.undo()
        return _Calls(recorder.calls)


_run = InterpretedFunction.run


@contextmanager
def _launches_pass(recorder: _Recorder | None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if recorder is None:
            patch.setattr(InterpretedFunction, "run", _run)
        else:
            patch.setattr(InterpretedFunction, "run", lambda *args, **kwargs: recorder.launch(_run, *args, **kwargs))
        yield
