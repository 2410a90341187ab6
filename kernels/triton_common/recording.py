"""Records how public functions launch their kernels: an op's builds.py calls them with tensors without memory, which
lists what a GPU would compile.

    recorded("plain-576", lambda: rms_norm(bf16(8, 576), bf16(576), 1e-5), expects_vectors=True)

Neither a GPU nor the interpreter is needed, and nothing is computed.
"""

import inspect
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import KernelInterface

from kernels.triton_common.device import recording_for
from kernels.triton_common.kernel_build import ARCHS, KernelBuild

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.int32: "i32",
    torch.int64: "i64",
}
# Triton's defaults.
_OPTIONS = {"num_warps": 4, "num_stages": 3}


def tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def bf16(*shape: int) -> torch.Tensor:
    return tensor(torch.bfloat16, *shape)


def float32(*shape: int) -> torch.Tensor:
    return tensor(torch.float32, *shape)


def int32(*shape: int) -> torch.Tensor:
    return tensor(torch.int32, *shape)


def recorded(
    name: str,
    launch: Callable[[], object],
    *,
    kernel: Any = None,
    nth: int = 0,
    archs: tuple[int, ...] = ARCHS,
    **expects: Any,
) -> KernelBuild:
    """Returns the build of the only kernel that `launch` launches or, with `kernel`, of that kernel's nth launch.
    archs: architectures with the same launch. expects: fields of KernelBuild that are not part of a launch."""
    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def record(function: Any, grid: object) -> Callable[..., None]:
        return lambda *args, **kwargs: launches.append((function, args, kwargs))

    with recording_for(archs[0]), patch.object(KernelInterface, "__getitem__", record):
        launch()
    assert kernel is not None or len(launches) == 1, f"{name}: which of {len(launches)} launches?"
    found = [each for each in launches if kernel in (None, each[0])]
    return KernelBuild(name=name, archs=archs, **specialization(*found[nth]), **expects)


def specialization(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The specialization that Triton compiles for these arguments, by the rules of triton.runtime.jit."""
    options = {name: kwargs.pop(name, value) for name, value in _OPTIONS.items()}
    interpreted = isinstance(function, InterpretedFunction)
    general = (function.kwargs["do_not_specialize"] if interpreted else function.do_not_specialize) or ()
    parameters = inspect.signature(function.fn)
    signature: dict[str, str] = {}
    constexprs: dict[str, Any] = {}
    multiples: list[str] = []
    for name, value in parameters.bind(*args, **kwargs).arguments.items():
        is_special = name not in general
        if parameters.parameters[name].annotation is tl.constexpr or value is None:
            constexprs[name] = value
        elif isinstance(value, torch.Tensor):
            signature[name] = f"*{_TYPES[value.dtype]}"
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1 and is_special:
            constexprs[name] = 1
        else:
            signature[name] = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
            if value % 16 == 0 and is_special:
                multiples.append(name)
    return {
        "fn": function,
        "signature": signature,
        "constexprs": constexprs,
        "multiples_of_16": tuple(multiples),
        **options,
    }
