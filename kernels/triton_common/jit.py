"""triton.jit, as pyright can follow it."""

import os
from collections.abc import Callable, Sequence
from typing import Any

# A product that is only added to something else is not rounded in between: the default of Triton up to 3.9, which warns
# about those who don't say so, and no longer the one from 3.10 on. Read when a kernel is compiled.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import triton


def jit(function: Callable[..., Any] | None = None, *, do_not_specialize: Sequence[str] = ()) -> Any:
    """triton.jit(function). Its declared type demands tl.constexpr of those who launch a kernel with plain numbers, and
    knows neither num_warps nor num_stages.

    do_not_specialize: integer arguments that change from step to step, such as a count of tokens. Triton would compile
    three kernels for one of them, for 1, multiples of 16 and others, each when a batch first needs it.
    """
    return triton.jit(function, do_not_specialize=do_not_specialize)  # pyright: ignore[reportCallIssue, reportArgumentType]
