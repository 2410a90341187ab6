"""Makes this process stand still for a while, as a long callback or a frozen container does."""

import ctypes


def stand_still(seconds: float) -> None:
    """Sleeps and holds the interpreter's lock: no other thread runs Python meanwhile. Sockets go on filling."""
    ctypes.PyDLL(None).usleep(ctypes.c_uint(int(seconds * 1e6)))
