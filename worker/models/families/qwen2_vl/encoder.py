"""Makes embeddings of images and videos for Qwen2-VL and Qwen2.5-VL."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from configs.groups.media import ItemLimits, ProcessorOptions
from kernels.backend import Backend
from protos.inference_pb2 import ITEM_KIND_IMAGE, ITEM_KIND_VIDEO, ItemData, ItemKind
from runtime.media.recipes.preprocessor import read_preprocessor
from runtime.media.recipes.qwen2_vl import Qwen2VLRecipe
from runtime.media.recipes.recipe import ItemSize, Recipe
from worker.encoders.encoder import Encoder, ItemError, Prepared
from worker.encoders.pixels import Frames, Pixels, resample_of, scale_of_values, valued
from worker.encoders.tower import FloatsReader
from worker.models.families.qwen2_vl.config import text_config
from worker.models.families.qwen2_vl.largest import largest
from worker.models.families.qwen2_vl.tower import QwenTower, QwenTowerConfig, tower_config, tower_shapes
from worker.weights.reader import Shape, WeightReader

_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
# Patches that are made of pixels at a time.
_PATCHES = 4096


def _config(raw: Mapping[str, Any]) -> QwenTowerConfig:
    return tower_config(raw, int(text_config(raw)["hidden_size"]))


class QwenEncoder(Encoder):
    def __init__(
        self,
        raw: Mapping[str, Any],
        directory: Path,
        recipe: Recipe,
        reader: WeightReader,
        backend: Backend,
        options: ProcessorOptions,
    ) -> None:
        """See worker.models.family.MakeEncoder."""
        assert isinstance(recipe, Qwen2VLRecipe)
        self.recipe = self._recipe = recipe
        self._options, self._device = options, backend.device
        self._config = config = _config(raw)
        self._tower = QwenTower(config, FloatsReader(reader), backend)
        self.hidden_size, self.weight_bytes = config.out_size, self._tower.num_bytes
        names = {ITEM_KIND_IMAGE: "image", ITEM_KIND_VIDEO: "video"}
        kinds = {kind: read_preprocessor(directory, name) for kind, name in names.items()}
        self._resample = {kind: resample_of(each, Image.Resampling.BICUBIC) for kind, each in kinds.items()}
        self._tables = {kind: scale_of_values(each, _MEAN, _STD, backend.device) for kind, each in kinds.items()}

    @staticmethod
    def shapes(raw: Mapping[str, Any]) -> dict[str, Shape]:
        """See worker.models.family.MakeEncoder."""
        return tower_shapes(_config(raw))

    def prepare(self, data: ItemData) -> Prepared:
        """See Encoder."""
        frames = Frames(data)
        # Positions in time don't matter here.
        size = ItemSize(
            kind=data.kind,
            width=frames.width,
            height=frames.height,
            num_frames=len(frames),
            min_pixels=data.options.min_pixels if data.options.HasField("min_pixels") else self._options.min_pixels,
            max_pixels=data.options.max_pixels if data.options.HasField("max_pixels") else self._options.max_pixels,
        )
        try:
            target = self._recipe.resized(size)
        except ValueError as error:
            raise ItemError(str(error)) from None
        return self._pixels(frames.resized(target, self._resample[data.kind]), data.kind)

    def encode(self, prepared: Prepared) -> torch.Tensor:
        """See Encoder."""
        assert isinstance(prepared, Pixels)
        self._tower.ranks.group = self.group
        x_NE = torch.cat([self._tower.embed(patches) for patches in self.patches(prepared)])
        return self._tower(x_NE, prepared.grid)

    def patches(self, prepared: Pixels) -> Iterator[torch.Tensor]:
        """Yields the pixel_values of transformers' processors, some patches at a time: float32 [N, numbers]. A patch's
        numbers are ordered by colour, frame, row and column."""
        recipe, table = self._recipe, self._tables[prepared.kind]
        depth, side, merge = recipe.temporal_patch_size, recipe.patch_size, recipe.merge_size
        _, rows, columns = prepared.grid
        step = max(1, _PATCHES // (columns * merge**2))
        for first_frame in range(0, len(prepared.frames), depth):
            frames = prepared.frames[first_frame : first_frame + depth]
            if len(frames) < depth:
                # An image's frame, or a video's last one, stands for those that are missing.
                frames = torch.cat((frames, frames[-1:].expand(depth - len(frames), -1, -1, -1)))
            for row in range(0, rows, step):
                pixels = frames[:, row * recipe.side : min(row + step, rows) * recipe.side].to(self._device)
                values = valued(pixels, table).view(depth, -1, merge, side, columns, merge, side, 3)
                # Merged row and column, row and column within it; colour, frame, pixel's row and column.
                yield values.permute(1, 4, 2, 5, 7, 0, 3, 6).reshape(-1, 3 * depth * side * side)

    def workspace_bytes(self, size: ItemSize) -> int:
        """See Encoder."""
        height, width = self._recipe.resized(size)
        times = -(-size.num_frames // self._recipe.temporal_patch_size)
        num_patches = times * height * width // self._recipe.patch_size**2
        return self._config.shape.workspace_bytes(num_patches, self._config.patch_numbers)

    def largest(self, limits: ItemLimits, most_tokens: int) -> ItemSize | None:
        """See Encoder."""
        return largest(self._recipe, limits, self._options, most_tokens)

    def dummy(self, size: ItemSize) -> Prepared:
        """See Encoder."""
        frames = torch.zeros(size.num_frames, *self._recipe.resized(size), 3, dtype=torch.uint8)
        return self._pixels(frames, size.kind)

    def _pixels(self, frames: torch.Tensor, kind: ItemKind) -> Pixels:
        times = -(-len(frames) // self._recipe.temporal_patch_size)
        grid = times, frames.shape[1] // self._recipe.side, frames.shape[2] // self._recipe.side
        return Pixels(frames=frames, num_embeddings=grid[0] * grid[1] * grid[2], kind=kind, grid=grid)
