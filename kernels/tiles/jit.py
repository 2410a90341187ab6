"""triton.jit, as pyright can follow it."""

from collections.abc import Callable, Sequence
from typing import Any

import triton


def jit(function: Callable[..., Any] | None = None, *, do_not_specialize: Sequence[str] = ()) -> Any:
    """triton.jit(function). Its declared type demands tl.constexpr of those who launch a kernel with plain numbers, and
    knows neither num_warps nor num_stages.

    do_not_specialize: integer arguments that change from step to step, such as a count of tokens. Triton would compile
    three kernels for one of them, for 1, multiples of 16 and others, each when a batch first needs it.
    """
    return triton.jit(function, do_not_specialize=do_not_specialize)  # pyright: ignore[reportCallIssue, reportArgumentType]
