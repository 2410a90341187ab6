"""The set of kernels for this CPU, loaded and checked once a process."""

import logging
from functools import lru_cache

from kernels.native.build import BuildError, build
from kernels.native.library import NativeKernels
from kernels.native.paths import path_of_this_cpu

_log = logging.getLogger("octavo.kernels")


@lru_cache(maxsize=1)
def native_kernels() -> NativeKernels | None:
    """The kernels of this CPU; None, with a warning that says what to do, if they cannot be had.

    The first call may build them, which takes seconds. Raises NativeKernelsError if they compute wrongly.
    """
    path = path_of_this_cpu()
    if path is None:
        _log.warning("this CPU has no AVX2, which the C++ kernels need: computing with PyTorch, several times slower")
        return None
    try:
        kernels = NativeKernels(path, build(path))
    except (BuildError, OSError) as error:
        _log.warning("computing with PyTorch, several times slower than with the C++ kernels: %s", error)
        return None
    # The check calls the ops, which import this module.
    from kernels.native.check import check

    check(kernels)
    return kernels
