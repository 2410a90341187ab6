"""The GPU architecture that kernels are launched or recorded for."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_recorded_arch: ContextVar[int | None] = ContextVar("recorded_arch", default=None)


def arch_of(device: torch.device | str) -> int | None:
    """The GPU's compute capability, 90 for 9.0, or the one that builds are recorded for; None: interpreted kernels."""
    if torch.device(device).type != "cuda":
        return _recorded_arch.get()
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@contextmanager
def recording_for(arch: int) -> Iterator[None]:
    """Within the block, a device that is not a GPU counts as one of this compute capability."""
    token = _recorded_arch.set(arch)
    try:
        yield
    finally:
        _recorded_arch.reset(token)
