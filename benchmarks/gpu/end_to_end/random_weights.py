"""Random weights, drawn when they are read."""

import math
import zlib
from collections.abc import Sequence

import torch

from benchmarks.gpu.end_to_end.shapes import Variant
from kernels.linear.weights import Weight, quantize_fp8
from worker.models.families.llama import LlamaModel


class RandomWeights:
    """A worker.weights.reader.WeightReader. A tensor's name seeds its numbers, so every read gives the same ones; they
    are scaled so that activations stay about 1 in any layer."""

    def __init__(self, variant: Variant, device: torch.device, dtype: torch.dtype) -> None:
        self._shapes = LlamaModel.tensor_shapes(variant.config)
        self._fp8, self._device, self._dtype = variant.fp8, device, dtype

    @property
    def num_bytes(self) -> int:
        """Approximate bytes of the weights on the device."""
        matrices = sum(math.prod(shape) for name, shape in self._shapes.items() if "_proj" in name)
        others = sum(math.prod(shape) for name, shape in self._shapes.items() if "_proj" not in name)
        return matrices * (1 if self._fp8 else self._dtype.itemsize) + others * self._dtype.itemsize

    def __call__(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        values = torch.empty(shape, dtype=self._dtype, device=self._device).normal_(generator=generator)
        return values.mul_(shape[1] ** -0.5) if len(shape) == 2 else values.mul_(0.1).add_(1.0)

    def weight(self, name: str, outputs: slice | None = None, inputs: slice | None = None) -> Weight:
        assert outputs is None
        assert inputs is None
        return quantize_fp8(self(name)) if self._fp8 else self(name)

    def float32(self, name: str) -> torch.Tensor:
        return self(name).float()

    def head_weight(self, name: str, outputs: slice | None = None) -> Weight:
        assert outputs is None
        return self(name)

    def kv_scale(self, attention: str) -> None:
        """None, for a scale of 1: keys and values are about that large."""

    def packed(self, names: Sequence[str]) -> None:
        """None: nothing is packed."""

    def keep(self, names: Sequence[str], packed: object) -> None:
        raise AssertionError("nothing is packed on a GPU")
