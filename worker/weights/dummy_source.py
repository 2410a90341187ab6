"""Random weights at a config's shapes, for benchmarks: the speed of a model without its files."""

import zlib
from collections.abc import Mapping
from pathlib import Path

import torch

from worker.take_tensor import Shape


class DummySource:
    """A TensorSource whose tensors depend on nothing but their names and shapes."""

    def __init__(self, path: Path, shapes: Mapping[str, Shape]) -> None:
        self.path = path
        self.shapes = shapes

    def tensor(self, name: str, dtype: torch.dtype | None = None, rows: slice | None = None) -> torch.Tensor:
        values = self._values(name).to(dtype or torch.float32)
        return values if rows is None else values[rows].clone()

    def _values(self, name: str) -> torch.Tensor:
        shape = self.shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return torch.randn(shape, generator=generator).mul_(0.02)

    def weight(self, name: str, rows: slice | None = None) -> torch.Tensor:
        return self.tensor(name, None, rows)

    def is_left_out(self, name: str) -> bool:
        return False

    def kv_scale(self, attention: str) -> tuple[float, float] | None:
        return None
