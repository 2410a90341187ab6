"""How a checkpoint stores its linear layers: schemes, and the layers that each applies to."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch

from kernels.linear.weights import Weight
from worker.weights.quantization.kinds import Quantization
from worker.weights.reader import Shape
from worker.weights.safetensors_files import SafetensorsFiles

FLOATS = ("F32", "BF16", "F16", "F64")


class StoredLayer(Protocol):
    """The weight of one linear layer, its tensors checked."""

    # Outputs and inputs.
    shape: Shape
    # The names of the tensors that it consists of.
    tensors: Collection[str]

    def floats(self, rows: slice) -> torch.Tensor:
        """Returns some outputs with all their inputs, dequantized to float32. Raises WeightsError."""
        ...

    def weight(self, rows: slice | None) -> Weight | None:
        """Returns some outputs (None: all) as kernels compute with them, without a loss; None if no kernel does. Raises
        WeightsError."""
        ...


class Scheme(Protocol):
    """A layout of a quantized weight."""

    @property
    def made_for(self) -> Quantization:
        """The quantization whose kernels take the weights as they are stored; none: there is none."""
        ...

    @property
    def is_packed(self) -> bool:
        """True if the checkpoint says nothing about the numbers that its inputs are computed with: with quantization
        `made_for`, layers are taken as they are, and those that are stored as floats stay so."""
        ...

    def holds(self, files: SafetensorsFiles, name: str) -> bool:
        """Returns True if the files store the weight `name` in this layout; False: as floats, or not at all."""
        ...

    def missing(self, files: SafetensorsFiles, name: str) -> list[str]:
        """Returns the names of tensors that the weight needs and the files lack."""
        ...

    def open(self, files: SafetensorsFiles, name: str) -> StoredLayer:
        """Raises WeightsError for tensors whose dtypes or shapes do not fit. Nothing is missing."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredQuantization:
    """How each layer is stored: by the first scheme whose targets match."""

    schemes: tuple[tuple[tuple[str, ...], Scheme], ...] = ()
    # Layers that are stored as floats: names, or re: and a regular expression.
    ignored: tuple[str, ...] = ()
    # For the log, such as "gptq, 4 bits, groups of 128".
    description: str = ""

    def scheme_of(self, layer: str) -> Scheme | None:
        """Returns a layer's scheme; None: it is stored as floats. layer: the name of its weight without ".weight", such
        as model.layers.3.mlp.up_proj."""
        if any(_names(pattern, layer) for pattern in self.ignored):
            return None
        for targets, scheme in self.schemes:
            if any(target == "Linear" or _names(target, layer) for target in targets):
                return scheme
        return None

    @property
    def made_for(self) -> Quantization:
        """The quantization that the checkpoint was made for: int8 if its inputs were calibrated for that, fp8 if GPU
        kernels take all quantized weights as they are stored, int4 or int8 if its weights are packed so and kernels
        keep them."""
        kinds: set[Quantization] = {scheme.made_for for _, scheme in self.schemes}
        if len(kinds) > 1 and self.is_packed and "none" not in kinds:
            return "int4"
        return kinds.pop() if len(kinds) == 1 else "none"

    @property
    def is_packed(self) -> bool:
        """True if all schemes are packed."""
        return bool(self.schemes) and all(scheme.is_packed for _, scheme in self.schemes)


def check_patterns(patterns: Collection[str]) -> None:
    """Checks the patterns that begin with re:. Raises ValueError for an invalid regular expression."""
    for pattern in patterns:
        if pattern.startswith("re:"):
            _compiled(pattern)


def beside(name: str, other: str) -> str:
    """Maps layer.weight to layer.other."""
    return f"{name.removesuffix('weight')}{other}"


def one_of(names: tuple[str, ...]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def _names(pattern: str, layer: str) -> bool:
    """Returns True if a pattern is a layer's name, a module around it (model.layers.3) or its short name (lm_head)."""
    if pattern.startswith("re:"):
        return _compiled(pattern).match(layer) is not None
    return layer == pattern or layer.startswith(f"{pattern}.") or layer.endswith(f".{pattern}")


@lru_cache
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern.removeprefix("re:"))
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
