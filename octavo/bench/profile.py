"""Splits a step's time into GEMM with fused ops, attention, rope with the cache write, scheduling and Python."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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


@contextmanager
def op_times() -> Iterator[KernelTimes]:
    """Times each op within a `with` block: by the C++ kernels' own clock, or around PyTorch's functions."""
    if (kernels := native_kernels()) is not None:
        with kernels.measuring() as times:
            yield times
        return
    times = KernelTimes()
    with ExitStack() as stack:
        for op, functions in _FUNCTIONS.items():
            for owner, name in functions:
                original = getattr(owner, name)
                setattr(owner, name, _timed(times, op, original))
                stack.callback(setattr, owner, name, original)
        yield times


def _timed(times: KernelTimes, op: Op, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **keywords: Any) -> Any:
        start = time.perf_counter()
        result = original(*arguments, **keywords)
        times.add(op, 0, time.perf_counter() - start)
        return result

    return call


class StepProfile:
    """The engine's steps since it was made, with the time of ops."""

    def __init__(self, engine: Engine, ops: KernelTimes) -> None:
        self._times, self._ops = engine.times, ops
        self._begin = (self._times.num_steps, self._times.total, self._times.scheduling)

    def split(self) -> dict[str, object]:
        """Mean milliseconds of a profiled step and of its parts, which add up to it.

        python is the remainder: the interpreter, and small ops of PyTorch and numpy.
        """
        now = (self._times.num_steps, self._times.total, self._times.scheduling)
        steps, total, scheduling = (after - before for after, before in zip(now, self._begin, strict=True))
        parts = {
            "gemm": self._ops.of(Op.LINEAR),
            "attention": self._ops.of(Op.ATTENTION),
            "rope": self._ops.of(Op.ROPE_CACHE_WRITE),
            "scheduling": scheduling,
        }
        parts["python"] = total - sum(parts.values())
        return {
            "profiled_step_ms": round(total / steps * 1e3, 3),
            **{f"profiled_{name}_ms": round(value / steps * 1e3, 3) for name, value in parts.items()},
        }
