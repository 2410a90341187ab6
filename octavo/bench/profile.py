"""Splits steps into GEMM (with what is fused into linears), attention, other ops, Python and scheduling, with torch's
profiler.

Profiled steps are slower than others, mostly in their Python part; what the split shows are proportions.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

import worker.layers.attention
from kernels.linear import PackedLinear
from kernels.rope_cache_write import RopeCacheWrite
from octavo.engine import Engine

_GEMM, _ROPE, _ATTENTION = "octavo.gemm", "octavo.rope", "octavo.attention"


class StepProfile:
    """Profiles the engine's steps within a `with` block."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._profiler = profile(activities=[ProfilerActivity.CPU])
        self._labels = (
            _Label(PackedLinear, "__call__", _GEMM),
            _Label(PackedLinear, "add_to_", _GEMM),
            _Label(RopeCacheWrite, "__call__", _ROPE),
            _Label(worker.layers.attention, "paged_attention", _ATTENTION),
        )
        self._begin = (0, 0.0, 0.0)

    def __enter__(self) -> "StepProfile":
        for label in self._labels:
            label.put_on()
        times = self._engine.times
        self._begin = (times.num_steps, times.total, times.scheduling)
        self._profiler.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._profiler.__exit__(kind, error, trace)
        for label in self._labels:
            label.take_off()

    def split(self) -> dict[str, object]:
        """Mean milliseconds of a profiled step, and of its parts, which add up to it.

        gemm and attention hold all time within those calls, for the profiler sees no C++ kernel; other_ops is rope with
        the cache write and all other ops; python is what is left beside scheduling: the interpreter's time, and that of
        starting ops.
        """
        times = self._engine.times
        steps, total, scheduling = (
            now - then for now, then in zip((times.num_steps, times.total, times.scheduling), self._begin, strict=True)
        )
        seconds = {_GEMM: 0.0, _ATTENTION: 0.0, "other": 0.0}
        for event in self._profiler.events() or ():
            if event.cpu_parent is None:  # otherwise its time is in that of a label, or of another op
                part = event.name if event.name in seconds else "other"
                seconds[part] += event.time_range.elapsed_us() / 1e6
        parts = {
            "gemm": seconds[_GEMM],
            "attention": seconds[_ATTENTION],
            "other_ops": seconds["other"],
            "scheduling": scheduling,
            "python": total - scheduling - sum(seconds.values()),
        }
        return {
            "profiled_step_ms": round(total / steps * 1e3, 3),
            **{f"profiled_{name}_ms": round(value / steps * 1e3, 3) for name, value in parts.items()},
        }


class _Label:
    """Makes the profiler see calls of a function under a name."""

    def __init__(self, owner: Any, name: str, label: str) -> None:
        self._owner, self._name, self._label = owner, name, label
        self._original: Callable[..., Any] = getattr(owner, name)

    def put_on(self) -> None:
        def labelled(*arguments: Any, **keywords: Any) -> Any:
            with record_function(self._label):
                return self._original(*arguments, **keywords)

        setattr(self._owner, self._name, labelled)

    def take_off(self) -> None:
        setattr(self._owner, self._name, self._original)
