"""AMX's tile registers, which Linux gives only to processes that ask."""

import ctypes
import logging
import os
import platform
from functools import lru_cache

_SYS_ARCH_PRCTL = 158  # on x86-64
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18

_log = logging.getLogger("octavo.kernels")


@lru_cache(maxsize=1)
def may_use_tiles() -> bool:
    """Asks Linux to let this process's threads use tiles, and returns its answer; warns if that is no. Only for CPUs
    with AMX."""
    if platform.machine() != "x86_64":
        return False
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.argtypes, syscall.restype = (ctypes.c_long, ctypes.c_long, ctypes.c_long), ctypes.c_long
    if syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0:
        return True
    _log.warning(
        "computing without AMX, which this CPU has: Linux refuses its tiles (%s); Linux 5.16 or newer permits them, "
        "unless a sandbox forbids arch_prctl or a thread has a signal stack that is too small",
        os.strerror(ctypes.get_errno()),
    )
    return False
