"""triton.jit, as pyright can follow it."""

from collections.abc import Callable
from typing import Any

import triton


def jit(function: Callable[..., Any]) -> Any:
    """triton.jit(function). Its declared type demands tl.constexpr of those who launch a kernel with plain numbers, and
    knows neither num_warps nor num_stages."""
    return triton.jit(function)
