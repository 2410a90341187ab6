"""Counts how often interpreted kernels read each number of a tensor."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder


@contextmanager
def reads_of(tensor: torch.Tensor) -> Iterator[np.ndarray]:
    """Yields int64 counts in the shape of the contiguous tensor, which grow while kernels load from its memory."""
    assert tensor.is_contiguous()
    counts = np.zeros(tensor.numel(), np.int64)
    load, start = InterpreterBuilder.create_masked_load, tensor.data_ptr()

    def counting(self: InterpreterBuilder, ptrs: Any, mask: Any, *args: Any) -> Any:
        addresses = ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)].astype(np.int64) - start
        inside = addresses[(addresses >= 0) & (addresses < tensor.nbytes)]
        np.add.at(counts, inside // tensor.itemsize, 1)
        return load(self, ptrs, mask, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_masked_load", counting)
        yield counts.reshape(tensor.shape)
