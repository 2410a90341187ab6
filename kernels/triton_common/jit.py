"""triton.jit, in a form that pyright can check, with launches that look up compiled code once."""

import os
from collections.abc import Callable, Sequence
from typing import Any

# Fuses a product with the sum it goes into, without rounding in between. Up to 3.9 this is Triton's default, with a
# warning unless it is set; from 3.10 on it is not. Triton reads the variable when it compiles a kernel.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import triton
from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction


class Kernel(JITFunction[Any]):
    """A JITFunction that calls the launcher of compiled code directly.

    Triton's own launch takes Python three to five times as long: for each one it turns the launch's options to text,
    looks up knobs, compares the globals that the kernel has used, and calls hooks. Here a specialization, found by
    Triton's own rules, leads to the launcher; the first launch of each is Triton's. Launches that are hooked, as
    profilers do it, are all Triton's.
    """

    def __init__(self, function: Callable[..., Any], do_not_specialize: Sequence[str] = ()) -> None:
        super().__init__(function, do_not_specialize=do_not_specialize)
        # By device: what turns arguments to a specialization. By device, specialization and options: the compiled
        # kernel, its launcher, and the launcher's arguments.
        self._binders: dict[int, Callable[..., Any]] = {}
        self._compiled: dict[tuple[object, ...], tuple[Any, Any, Any, Any]] = {}

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        active: Any = driver.active
        runtime = knobs.runtime
        device = active.get_current_device()
        binder = self._binders.get(device)
        has_hooks = self.pre_run_hooks or runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls
        if binder is None or warmup or has_hooks:
            kernel = super().run(*args, grid=grid, warmup=warmup, **kwargs)
            # (kernels, keys, target, backend, binder), which the launch has made.
            self._binders[device] = self.device_caches[device][-1]
            return kernel
        arguments, specialization, options = binder(*args, **kwargs)
        key = (device, *specialization, *options.items())
        found = self._compiled.get(key)
        if found is None:
            kernel: Any = super().run(*args, grid=grid, warmup=False, **kwargs)
            self._compiled[key] = kernel, kernel.run, kernel.function, kernel.packed_metadata
            return kernel
        kernel, launch, function, metadata = found
        y, z = grid[1] if len(grid) > 1 else 1, grid[2] if len(grid) > 2 else 1
        # No metadata of the launch, and no hooks.
        launch(
            grid[0], y, z, active.get_current_stream(device), function, metadata, None, None, None, *arguments.values()
        )
        return kernel


def _mend_interpreter() -> None:
    """Lets Triton 3.6's interpreter use a loaded number as a bound or an index with numpy 2.4 and newer, which make no
    int of an array of one dimension; Triton 3.7 mended it. Its patch of tl.tensor is replaced at each launch, so this
    replaces what applies it."""
    from triton.runtime import interpreter

    patch: Callable[..., None] = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_lang_tensor


if knobs.runtime.interpret and triton.__version__.startswith("3.6."):
    _mend_interpreter()


def jit(function: Callable[..., Any] | None = None, *, do_not_specialize: Sequence[str] = ()) -> Any:
    """triton.jit(function), typed as Any: its declared type demands tl.constexpr where a launch passes plain numbers,
    and knows neither num_warps nor num_stages.

    do_not_specialize: integer arguments that change from step to step, such as a count of tokens. Otherwise Triton
    compiles three kernels for each (for 1, for multiples of 16, and for others), when a batch first needs them.
    """
    if function is None:
        return lambda function: jit(function, do_not_specialize=do_not_specialize)
    if knobs.runtime.interpret:
        interpreted: Any = triton.jit
        return interpreted(function, do_not_specialize=do_not_specialize)
    return Kernel(function, do_not_specialize)
