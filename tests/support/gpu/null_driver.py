"""A driver of Triton that launches nothing: what Python does for a launch, without a GPU.

    python -m tests.support.gpu.null_driver

prints a line of JSON: the calls that a launch makes in Python and C, by Octavo's kernels and by Triton's own; and for
launches that differ, whether both launch the same code with the same arguments. TRITON_INTERPRET must not be set.
"""

import json
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import triton.compiler
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from kernels.triton_common.jit import jit


class _Utils:
    def load_binary(self, name: str, cubin: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """Returns a module, a function, registers, spilled registers, and the most threads."""
        return 1, 1, 32, 0, 1024

    def unload_module(self, module: int) -> None: ...

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10, "multiprocessor_count": 132}


class NullLauncher:
    def __init__(self, source: object, metadata: object) -> None:
        self.launched: list[tuple[object, ...]] = []
        self.keeps = False

    def __call__(self, *args: object) -> None:
        if self.keeps:
            self.launched.append(args)


class NullDriver:
    """One H200, of which only the name is there."""

    launcher_cls = NullLauncher
    utils = _Utils()

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 7

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class NullKernel:
    """Stands in for compiled code; counts launches of all kernels."""

    num_launches = 0
    function, packed_metadata = 1, ()

    def __init__(self, source: object, **options: object) -> None: ...

    def run(self, *args: object) -> None:
        NullKernel.num_launches += 1

    def launch_metadata(self, *args: object) -> None: ...


def install(*, compiles: bool) -> None:
    """Makes all launches of this process go nowhere. compiles: kernels are still compiled, for sm_90."""
    driver.set_active(NullDriver())  # pyright: ignore[reportArgumentType]
    if not compiles:
        triton.compiler.compile = NullKernel  # pyright: ignore[reportAttributeAccessIssue]


@jit(do_not_specialize=["count"])
def copy_kernel(
    source,
    target,
    bias,
    count,
    source_stride,
    target_stride,
    scale,
    HAS_BIAS: tl.constexpr,
    SIZE: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """target = source * scale + bias, with as many arguments as an elementwise kernel has."""
    row = tl.program_id(0)
    column = tl.arange(0, SIZE)
    x = tl.load(source + row * source_stride + column, mask=column < count, other=0.0)
    if HAS_BIAS:
        x += tl.load(bias + column)
    tl.store(target + row * target_stride + column, x * scale + SHIFT, mask=column < count)


def launch(kernel: Any = copy_kernel, **changes: Any) -> Any:
    x, options = torch.empty(4, 64, dtype=changes.pop("dtype", torch.float32)), {"num_warps": 4}
    given = {
        "source": x,
        "target": x,
        "bias": None,
        "count": 64,
        "source_stride": 64,
        "target_stride": 64,
        "scale": 0.5,
        "HAS_BIAS": False,
        "SIZE": 64,
        "SHIFT": 2,
    }
    return kernel[(4,)](**(given | options | changes))


def triton_launch(**changes: Any) -> Any:
    """The same launch by Triton's own code."""
    return JITFunction.run(copy_kernel, *(), **launch_arguments(changes))


def launch_arguments(changes: dict[str, Any]) -> dict[str, Any]:
    taken: dict[str, Any] = {}

    class Taking:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda **given: taken.update(given, grid=grid, warmup=False)

    launch(Taking(), **changes)
    return taken


def calls_of(body: Callable[[], object]) -> tuple[int, int]:
    """Returns the calls of Python functions, and of C functions, that the body makes."""
    counts = {"call": 0, "c_call": 0}

    def count(frame: FrameType, event: str, argument: object) -> None:
        if event in counts:
            counts[event] += 1

    sys.setprofile(count)
    body()
    sys.setprofile(None)
    # Without those of the body itself and of setprofile.
    return counts["call"] - 1, counts["c_call"] - 1


# Launches of which each needs code of its own, but for the last two, which share that of the first.
DIFFERENT: list[dict[str, Any]] = [
    {},
    {"dtype": torch.bfloat16},
    {"source_stride": 1},
    {"source_stride": 65},
    {"source_stride": 1 << 33},
    {"count": 1 << 33},
    {"bias": torch.zeros(64), "HAS_BIAS": True},
    {"source": torch.empty(65)[1:]},
    {"SHIFT": 3},
    {"num_warps": 2},
    {"num_stages": 2},
    {"scale": 0.25},
    {"count": 1},
]


def _seen(run: Callable[..., Any], changes: dict[str, Any]) -> tuple[object, list[object]]:
    """Returns the launched code, and its launcher's arguments but for hooks and their metadata."""
    kernel = run(**changes)
    launcher = kernel.run
    launcher.keeps = True
    run(**changes)
    launcher.keeps = False
    (args,) = launcher.launched
    launcher.launched.clear()
    return id(kernel), [*args[:6], *args[9:]]


def main() -> None:
    install(compiles=True)
    kernels: list[object] = []
    same = True
    for changes in DIFFERENT:
        # The same memory in all launches of one case.
        given = {"source": torch.empty(4, 64, dtype=changes.get("dtype", torch.float32)), **changes}
        given["target"] = given["source"]
        ours, theirs = _seen(launch, given), _seen(triton_launch, given)
        kernels.append(ours[0])
        same &= ours[0] == theirs[0] and all(a is b or a == b for a, b in zip(ours[1], theirs[1], strict=True))
    args = launch_arguments({})
    grid = args.pop("grid")
    args.pop("warmup")
    print(
        json.dumps(
            {
                "calls": calls_of(lambda: copy_kernel[grid](**args)),
                "triton_calls": calls_of(lambda: JITFunction.run(copy_kernel, grid=grid, warmup=False, **args)),
                "is_same": bool(same),
                "kernels": [kernels.index(each) for each in kernels],
            }
        )
    )


if __name__ == "__main__":
    main()
