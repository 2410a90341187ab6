"""Splits a step's time into GEMM with fused ops, attention, rope with the cache write, scheduling and Python."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import worker.layers.attention
from kernels.cpu_backend import native_kernels
from kernels.kv_cache.write import RopeCacheWrite
from kernels.linear import PackedLinear
from kernels.native.library import KernelTimes, Op
from octavo.local.engine import Engine

# The functions that PyTorch's path calls for each op. Functions of one op do not call each other.
_FUNCTIONS: dict[Op, tuple[tuple[Any, str], ...]] = {
    Op.LINEAR: ((PackedLinear, "__call__"), (PackedLinear, "add_to_"), (PackedLinear, "argmax")),
    Op.ROPE_CACHE_WRITE: ((RopeCacheWrite, "__call__"),),
    Op.ATTENTION: ((worker.layers.attention, "paged_attention"),),
}


class OpTimes:
    """Times each op within a `with` block: by the C++ kernels' own clock, or around PyTorch's functions."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._times = KernelTimes()

    def __enter__(self) -> KernelTimes:
        if (kernels := native_kernels()) is not None:
            return self._stack.enter_context(kernels.measuring())
        for op, functions in _FUNCTIONS.items():
            for owner, name in functions:
                original = getattr(owner, name)
                setattr(owner, name, self._timed(op, original))
                self._stack.callback(setattr, owner, name, original)
        return self._times

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _timed(self, op: Op, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            start = time.perf_counter()
            result = original(*arguments, **keywords)
            self._times.add(op, 0, time.perf_counter() - start)
            return result

        return call


class StepProfile:
    """Profiles the engine's steps within a `with` block."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._ops = engine, OpTimes()
        self._times = KernelTimes()
        self._begin = (0, 0.0, 0.0)

    def __enter__(self) -> "StepProfile":
        times = self._engine.times
        self._begin = (times.num_steps, times.total, times.scheduling)
        self._times = self._ops.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ops.__exit__(kind, error, trace)

    def split(self) -> dict[str, object]:
        """Mean milliseconds of a profiled step and of its parts, which add up to it.

        python is the remainder: the interpreter, and small ops of PyTorch and numpy.
        """
        times = self._engine.times
        steps, total, scheduling = (
            now - then for now, then in zip((times.num_steps, times.total, times.scheduling), self._begin, strict=True)
        )
        parts = {
            "gemm": self._times.of(Op.LINEAR),
            "attention": self._times.of(Op.ATTENTION),
            "rope": self._times.of(Op.ROPE_CACHE_WRITE),
            "scheduling": scheduling,
        }
        parts["python"] = total - sum(parts.values())
        return {
            "profiled_step_ms": round(total / steps * 1e3, 3),
            **{f"profiled_{name}_ms": round(value / steps * 1e3, 3) for name, value in parts.items()},
        }
