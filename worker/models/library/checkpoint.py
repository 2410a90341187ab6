"""Reads the files of a model of transformers under the names of the library's modules.

Checkpoints may have other names, store experts one by one, or fuse layers; the library's own table of conversions says
how its tensors are made of those that are stored.
"""

import re
from collections import defaultdict
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from worker.model_config import LibraryConfig
from worker.models.library.attention import PAGED, register
from worker.models.library.classes import meta_model
from worker.models.library.tensors import Presented, tensors_of, tied_names
from worker.weights.reader import Shape, WeightsError, some
from worker.weights.safetensors_source import SafetensorsFiles

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}


class _Made:
    """A group of tensors that a conversion makes of stored ones. names: by the conversion's source patterns."""

    def __init__(self, converter: Any, first: str) -> None:
        self.converter, self.first = converter, first
        self.names: dict[str, list[str]] = defaultdict(list)


class LibraryFiles(SafetensorsFiles):
    """Presents tensors as worker.models.library.tensors names them."""

    def __init__(self, directory: Path, library: LibraryConfig) -> None:
        super().__init__(directory)
        self._presented = tensors_of(library)
        register()
        self._model = meta_model(library, PAGED)
        # By the library's names: the stored tensor, or the group that it is made of.
        self._stored: dict[str, str] = {}
        self._made: dict[str, _Made] = {}
        # The group made last: successive experts are parts of one tensor.
        self._latest: tuple[_Made | None, dict[str, torch.Tensor]] = (None, {})
        shapes, dtypes = self.shapes, self.dtypes
        found = self._resolve(shapes, dtypes)
        self.shapes, self.dtypes = {}, {}
        for name, each in self._presented.items():
            if each.target not in found:
                continue
            shape, dtype = found.pop(each.target) if each.expert is None else found[each.target]
            self.shapes[name], self.dtypes[name] = _presented_shape(each, shape), dtype
        targets = {each.target for each in self._presented.values()}
        # What is left has no place in the model: it is presented as it is, for the check of tensors.
        for name, (shape, dtype) in found.items():
            if name not in targets:
                self.shapes[name], self.dtypes[name] = shape, dtype

    def stored_name(self, name: str) -> str:
        each = self._presented.get(name)
        return name if each is None else self._stored.get(each.target, name)

    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        each = self._presented.get(name)
        if each is None:
            return self._read_rows(self._stored.get(name, name), rows)
        if each.target in self._stored and each.expert is None and not each.transposed:
            return self._read_rows(self._stored[each.target], rows)
        if each.target in self._stored and each.expert is not None:
            expert = each.expert
            whole = self._read(self._stored[each.target], lambda file, stored: file.get_slice(stored)[expert])
        else:
            whole = self._whole(each.target)
            whole = whole if each.expert is None else whole[each.expert]
        whole = whole.t() if each.transposed else whole
        return (whole if rows is None else whole[rows]).contiguous()

    def _resolve(self, shapes: dict[str, Shape], dtypes: dict[str, str]) -> dict[str, tuple[Shape, str]]:
        """Finds what each stored tensor is for. Returns shape and dtype by the library's names."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        conversions = get_model_conversion_mapping(self._model)
        renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
        converters = [each for each in conversions if isinstance(each, WeightConverter)]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        state, prefix = self._model.state_dict(), self._model.base_model_prefix
        tied = tied_names(self._model)
        unused = [re.compile(each) for each in getattr(self._model, "_keys_to_ignore_on_load_unexpected", None) or ()]
        found: dict[str, tuple[Shape, str]] = {}
        groups: dict[str, _Made] = {}
        for stored in sorted(shapes, key=dot_natural_key):
            name, pattern = rename_source_key(stored, renamings, converters, prefix, state)
            if name not in state and stored in state:
                name, pattern = stored, None
            if name not in state and any(each.search(name) or each.search(stored) for each in unused):
                continue
            if name in tied:
                continue
            if pattern is None or name not in state:
                self._stored[name] = stored
                found[name] = shapes[stored], dtypes[stored]
                continue
            group = groups.setdefault(name, _Made(by_pattern[pattern], name))
            group.names[pattern].append(stored)
        for group in groups.values():
            stored = [name for names in group.names.values() for name in names]
            bad = [name for name in stored if dtypes[name] not in ("F32", "BF16", "F16", "F64")]
            if bad:
                raise WeightsError(
                    f"{self.path}: {some(bad)} are stored as {dtypes[bad[0]]}: tensors that transformers converts "
                    "must be floats; model_impl=octavo may read this checkpoint"
                )
            blank = {name: torch.empty(shapes[name], dtype=_DTYPES[dtypes[name]], device="meta") for name in stored}
            for name, tensor in self._converted(group, blank).items():
                self._made[name] = group
                found[name] = tuple(tensor.shape), dtypes[stored[0]]
        return found

    def _converted(self, group: _Made, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        converter = deepcopy(group.converter)
        for pattern, names in group.names.items():
            converter.collected_tensors[pattern] = [tensors[name] for name in names]
        try:
            made = converter.convert(group.first, model=self._model, config=self._model.config)
        except Exception as error:  # noqa: BLE001 - an operation of the library's that does not fit what is stored
            names = [name for each in group.names.values() for name in each]
            raise WeightsError(f"{self.path}: {some(names)} cannot be made into {group.first}: {error}") from None
        return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}

    def _whole(self, target: str) -> torch.Tensor:
        if target in self._stored:
            return self._read_rows(self._stored[target], None)
        group = self._made[target]
        if self._latest[0] is not group:
            names = [name for each in group.names.values() for name in each]
            self._latest = group, self._converted(group, {name: self._read_rows(name, None) for name in names})
        return self._latest[1][target]


def _presented_shape(each: Presented, shape: Shape) -> Shape:
    """Returns the shape of a presented tensor that is part of a tensor of this shape."""
    own = shape if each.expert is None else shape[1:]
    return own[::-1] if each.transposed else own
