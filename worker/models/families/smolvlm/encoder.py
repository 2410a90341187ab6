"""Makes embeddings of images for Idefics3 and SmolVLM."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from configs.groups.media import ItemLimits, ProcessorOptions
from kernels.backend import Backend
from protos.inference_pb2 import ITEM_KIND_IMAGE, ItemData
from runtime.media.recipes.idefics3 import Idefics3Recipe
from runtime.media.recipes.preprocessor import read_preprocessor
from runtime.media.recipes.recipe import ItemSize, Recipe
from worker.encoders.encoder import Encoder, ItemError, Prepared
from worker.encoders.pixels import Frames, Pixels, array_of, resample_of, resized, scale_of_values, valued
from worker.encoders.tower import FloatsReader
from worker.models.families.smolvlm.config import text_config
from worker.models.families.smolvlm.tower import SiglipConfig, SiglipTower, siglip_config, siglip_shapes
from worker.weights.reader import Shape, WeightReader

_MEAN = _STD = (0.5, 0.5, 0.5)
# Patches that the tower computes at a time, in whole tiles.
_PATCHES = 4096


def _config(raw: Mapping[str, Any]) -> SiglipConfig:
    return siglip_config(raw, int(text_config(raw)["hidden_size"]))


class SmolVLMEncoder(Encoder):
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
        assert isinstance(recipe, Idefics3Recipe)
        if options.min_pixels is not None or options.max_pixels is not None:
            raise ValueError(
                f"mm_processor_kwargs={options.model_dump(exclude_none=True)}: this model has no bounds of pixels; "
                "leave them out"
            )
        self.recipe = self._recipe = recipe
        self._device = backend.device
        self._config = _config(raw)
        self._tower = SiglipTower(self._config, FloatsReader(reader), backend)
        self.hidden_size, self.weight_bytes = self._config.out_size, self._tower.num_bytes
        settings = read_preprocessor(directory, "image")
        self._resample = resample_of(settings, Image.Resampling.LANCZOS)
        self._table = scale_of_values(settings, _MEAN, _STD, backend.device)

    @staticmethod
    def shapes(raw: Mapping[str, Any]) -> dict[str, Shape]:
        """See worker.models.family.MakeEncoder."""
        return siglip_shapes(_config(raw))

    def prepare(self, data: ItemData) -> Prepared:
        """See Encoder."""
        frames, options = Frames(data), data.options
        size = ItemSize(
            kind=data.kind,
            width=frames.width,
            height=frames.height,
            min_pixels=options.min_pixels if options.HasField("min_pixels") else None,
            max_pixels=options.max_pixels if options.HasField("max_pixels") else None,
        )
        try:
            tiling = self._recipe.tiling(size)
        except ValueError as error:
            raise ItemError(str(error)) from None
        side = self._recipe.tile_size
        image = resized(resized(frames.decoded(0), tiling.first, self._resample), tiling.second, self._resample)
        tiles = [
            image.crop((column * side, row * side, (column + 1) * side, (row + 1) * side))
            for row in range(tiling.rows)
            for column in range(tiling.columns)
        ]
        tiles.append(resized(image, (side, side), self._resample))
        return self._pixels(torch.stack([array_of(tile) for tile in tiles]))

    def encode(self, prepared: Prepared) -> torch.Tensor:
        """See Encoder."""
        assert isinstance(prepared, Pixels)
        self._tower.ranks.group = self.group
        step = max(1, _PATCHES // self._config.side**2)
        tiles = prepared.frames.split(step)
        return torch.cat([self._tower(self._patches(some)) for some in tiles])

    def pixel_values(self, prepared: Pixels) -> torch.Tensor:
        """Returns the pixel_values of transformers' processors: float32 [tiles, 3, height, width]."""
        return valued(prepared.frames.to(self._device), self._table).permute(0, 3, 1, 2)

    def _patches(self, tiles: torch.Tensor) -> torch.Tensor:
        """Returns float32 [N, numbers], a patch's numbers by colour, row and column. tiles: uint8."""
        side, size = self._config.side, self._config.patch_size
        # Pixels at the right and lower edge that fill no patch are left out, as by a convolution.
        values = valued(tiles[:, : side * size, : side * size].to(self._device), self._table)
        values = values.view(-1, side, size, side, size, 3).permute(0, 1, 3, 5, 2, 4)
        return values.reshape(-1, self._config.patch_numbers)

    def workspace_bytes(self, size: ItemSize) -> int:
        """See Encoder. Beside the results of all tiles, one call's tiles are computed at a time."""
        of_tile = self._config.side**2
        num_tiles = self._recipe.tiling(size).num_tiles
        rows = min(num_tiles * of_tile, max(_PATCHES, of_tile))
        results = 2 * 4 * num_tiles * self._recipe.tile_embeddings * self.hidden_size
        return self._config.shape.workspace_bytes(rows, self._config.patch_numbers) + results

    def largest(self, limits: ItemLimits, most_tokens: int) -> ItemSize | None:
        """See Encoder. Images are resized to one length whatever their size, so their number of tiles follows from the
        ratio of their sides; squares have the most."""
        if not limits.image.count:
            return None
        recipe = self._recipe
        side = min(limits.image.width or recipe.longest_edge, limits.image.height or recipe.longest_edge)
        most_tiles = max(1, recipe.max_tiles_of_side)
        shorter = [max(1, side * tiles // most_tiles) for tiles in range(most_tiles, 0, -1)]
        sizes = [
            ItemSize(kind=ITEM_KIND_IMAGE, width=width, height=height)
            for short in shorter
            for width, height in ((side, short), (short, side))
        ]
        tokens = {size: len(recipe.layout(size).token_ids) for size in sizes}
        fitting = [size for size in sizes if tokens[size] <= most_tokens]
        # Rows have a token at their end, so of two with as many tokens one may have more embeddings.
        if fitting:
            return max(fitting, key=lambda size: recipe.tiling(size).num_tiles)
        return min(sizes, key=lambda size: tokens[size])

    def dummy(self, size: ItemSize) -> Prepared:
        """See Encoder."""
        side = self._recipe.tile_size
        return self._pixels(torch.zeros(self._recipe.tiling(size).num_tiles, side, side, 3, dtype=torch.uint8))

    def _pixels(self, tiles: torch.Tensor) -> Pixels:
        return Pixels(frames=tiles, num_embeddings=len(tiles) * self._recipe.tile_embeddings)
