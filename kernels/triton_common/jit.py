"""triton.jit, in a form that pyright can check."""

import os
from collections.abc import Callable, Sequence
from typing import Any

# Fuses a product with the sum it goes into, without rounding in between. Up to 3.9 this is Triton's default, with a
# warning unless it is set; from 3.10 on it is not. Triton reads the variable when it compiles a kernel.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import triton


def jit(function: Callable[..., Any] | None = None, *, do_not_specialize: Sequence[str] = ()) -> Any:
    """triton.jit(function), typed as Any: its declared type demands tl.constexpr where a launch passes plain numbers,
    and knows neither num_warps nor num_stages.

    do_not_specialize: integer arguments that change from step to step, such as a count of tokens. Otherwise Triton
    compiles three kernels for each (for 1, for multiples of 16, and for others), when a batch first needs them.
    """
    return triton.jit(function, do_not_specialize=do_not_specialize)  # pyright: ignore[reportCallIssue, reportArgumentType]
