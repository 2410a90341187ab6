"""Records the kernels that the GPU path launches, as Triton would compile them, without running them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from triton.runtime.jit import KernelInterface

from kernels.triton_common.device import recording_for
from kernels.triton_common.recording import specialization

# A kernel's name, and all that its compiled code depends on.
Key = tuple[str, tuple[object, ...]]


class Launches:
    """Launches since the last `clear`, in order."""

    def __init__(self) -> None:
        self.keys: list[Key] = []

    def clear(self) -> None:
        self.keys.clear()

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.keys]


@contextmanager
def recorded_launches(arch: int = 90) -> Iterator[Launches]:
    """Within the block kernels are recorded, not launched, with the tiles of a GPU of compute capability `arch`.
    Memory that nothing has written is 0, so the results are."""
    launches, empty = Launches(), torch.empty

    def record(kernel: Any, grid: object) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            launches.keys.append(_key(kernel, args, kwargs))

        return launch

    def zeros(*args: Any, **kwargs: Any) -> torch.Tensor:
        return empty(*args, **kwargs).zero_()

    with pytest.MonkeyPatch.context() as patch, recording_for(arch):
        patch.setattr(KernelInterface, "__getitem__", record)
        patch.setattr(torch, "empty", zeros)
        yield launches


def _key(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key:
    fields = specialization(kernel, args, dict(kwargs))
    name = fields.pop("fn").fn.__name__
    # Triton also compiles for pointers that are multiples of 16, and for others.
    aligned = tuple(value.data_ptr() % 16 == 0 for value in args if isinstance(value, torch.Tensor))
    return name, (
        *(str(sorted(value.items()) if isinstance(value, dict) else value) for value in fields.values()),
        aligned,
    )
