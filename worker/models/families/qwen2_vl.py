"""Qwen2-VL and Qwen2.5-VL: a Qwen2 whose positions have three axes, and an encoder of images and videos."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from configs.groups.media import ItemLimit, ItemLimits, ProcessorOptions
from kernels.backend import Backend
from protos.inference_pb2 import ITEM_KIND_IMAGE, ITEM_KIND_VIDEO, ItemData, ItemKind
from runtime.media.recipes.preprocessor import read_preprocessor
from runtime.media.recipes.qwen2_vl import Qwen2VLRecipe
from runtime.media.recipes.recipe import ItemSize, Recipe
from worker.encoders.encoder import Encoder, ItemError, Pixels
from worker.encoders.pixels import Frames, resample_of, scale_of_values, valued
from worker.encoders.tower import FloatsReader
from worker.encoders.vision_files import VisionFiles
from worker.models.families.llama import LlamaModel, qwen2_fields
from worker.models.families.qwen2_vl_tower import QwenTower, QwenTowerConfig, tower_config, tower_shapes
from worker.models.family import Family
from worker.models.rope import rope_settings
from worker.weights.reader import Shape, WeightReader

_SECTION = (16, 24, 24)


def text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the language model's settings: under text_config since transformers 4.52, at the top before."""
    text = dict(raw.get("text_config") or raw)
    settings = rope_settings(text)
    # The older type means: default, with a section for each axis.
    if settings.get("rope_type", settings.get("type")) == "mrope":
        settings |= {"rope_type": "default"}
    settings.setdefault("rope_theta", text.get("rope_theta", 1_000_000.0))
    tied = raw.get("tie_word_embeddings") or text.get("tie_word_embeddings", False)
    tokens = {name: raw.get(name, 151655 + place) for place, name in enumerate(("image_token_id", "video_token_id"))}
    return {
        **text,
        **tokens,
        "rope_parameters": settings,
        "rope_scaling": None,
        "tie_word_embeddings": tied,
        "rms_norm_eps": text.get("rms_norm_eps", 1e-5),
        "eos_token_id": text.get("eos_token_id", raw.get("eos_token_id")),
        "max_position_embeddings": text.get("max_position_embeddings", 32768),
    }


def qwen2_vl_fields(raw: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """raw: from `text_config`. Raises ValueError."""
    section = tuple(int(pairs) for pairs in raw["rope_parameters"].get("mrope_section", _SECTION))
    pairs = int(raw["hidden_size"]) // int(raw["num_attention_heads"]) // 2
    if len(section) != 3 or sum(section) != pairs or min(section) < 0:
        raise ValueError(f"mrope_section={list(section)} must be three numbers whose sum is {pairs}, half of a head")
    return {
        **qwen2_fields(raw, num_layers),
        "mrope_section": section,
        "embedded_token_ids": frozenset((int(raw["image_token_id"]), int(raw["video_token_id"]))),
        "left_out": ("visual.",),
    }


class QwenVLFiles(VisionFiles):
    """Presents tensors under the names of the language model's family."""

    # Since version 4.52 transformers reads and writes the first names; the published files have the second ones.
    prefixes = (
        ("model.language_model.", "model."),
        ("model.visual.", "visual."),
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
    )
    split = ((".attn.qkv.", (".attn.q_proj.", ".attn.k_proj.", ".attn.v_proj.")),)
    flattened = ("visual.patch_embed.proj.weight",)


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

    def prepare(self, data: ItemData) -> Pixels:
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

    def encode(self, prepared: Pixels) -> torch.Tensor:
        """See Encoder."""
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
        return _largest(self._recipe, limits, self._options, most_tokens)

    def dummy(self, size: ItemSize) -> Pixels:
        """See Encoder."""
        frames = torch.zeros(size.num_frames, *self._recipe.resized(size), 3, dtype=torch.uint8)
        return self._pixels(frames, size.kind)

    def _pixels(self, frames: torch.Tensor, kind: ItemKind) -> Pixels:
        times = -(-len(frames) // self._recipe.temporal_patch_size)
        grid = times, frames.shape[1] // self._recipe.side, frames.shape[2] // self._recipe.side
        return Pixels(frames=frames, num_embeddings=grid[0] * grid[1] * grid[2], kind=kind, grid=grid)


# Frames of the longest video, where limits don't say.
DEFAULT_FRAMES = 16
# Ratios of an image's sides, from 1 on; the recipe takes no others.
_RATIOS = 200

# An item and its number of embeddings, which is that of its tokens.
_Found = tuple[int, ItemSize]


def _largest(recipe: Qwen2VLRecipe, limits: ItemLimits, options: ProcessorOptions, most_tokens: int) -> ItemSize | None:
    """See worker.encoders.encoder.Encoder.largest. Raises ValueError for options that contradict the recipe."""
    found: list[_Found] = []
    for kind, limit in ((ITEM_KIND_IMAGE, limits.image), (ITEM_KIND_VIDEO, limits.video)):
        if limit.count:
            found += _of_kind(recipe, limit, kind, options, most_tokens)
    if not found:
        return None
    fitting = [each for each in found if each[0] <= most_tokens]
    return (max(fitting, key=_count) if fitting else min(found, key=_count))[1]


def _count(found: _Found) -> int:
    return found[0]


def _of_kind(
    recipe: Qwen2VLRecipe, limit: ItemLimit, kind: ItemKind, options: ProcessorOptions, most_tokens: int
) -> Iterator[_Found]:
    """Yields items, the largest that fits among them, and the smallest one. Of two videos as long as the largest one,
    one may have more frames, and the other larger ones."""
    most_frames = (limit.num_frames or DEFAULT_FRAMES) if kind == ITEM_KIND_VIDEO else 1
    depth, best = recipe.temporal_patch_size, 0
    for times in range(-(-most_frames // depth), 0, -1):
        num_frames = min(times * depth, most_frames)
        # Rounded down to whole tokens of a frame, fewer frames can have more embeddings together.
        if times > 1 and times * (most_tokens // times) <= best:
            continue
        counts: list[int] = []
        for width, height in _candidates(recipe, limit, kind, options, most_tokens // times):
            size = _size(kind, width, height, num_frames, options)
            rows, columns = (side // recipe.side for side in recipe.resized(size))
            counts.append(times * rows * columns)
            yield counts[-1], size
        best = max([best, *(count for count in counts if count <= most_tokens)])
        if max(counts) <= most_tokens and times * _most_of_frame(recipe, kind, options) <= most_tokens:
            # No size is left out for want of room, so fewer frames have fewer embeddings.
            return


def _most_of_frame(recipe: Qwen2VLRecipe, kind: ItemKind, options: ProcessorOptions) -> int:
    return recipe.bounds(_size(kind, 1, 1, 1, options)).most // recipe.side**2


def _size(kind: ItemKind, width: int, height: int, num_frames: int, options: ProcessorOptions) -> ItemSize:
    return ItemSize(
        kind=kind,
        width=width,
        height=height,
        num_frames=num_frames,
        min_pixels=options.min_pixels,
        max_pixels=options.max_pixels,
    )


def _candidates(
    recipe: Qwen2VLRecipe, limit: ItemLimit, kind: ItemKind, options: ProcessorOptions, most_tokens: int
) -> Iterator[tuple[int, int]]:
    """Yields widths and heights within the limit, one of which has the most embeddings up to most_tokens.

    Sizes within the bounds of pixels are rounded to whole tokens, so the largest is the limit itself, or has the most
    whole tokens below max_pixels or most_tokens. Smaller images grow to min_pixels and are rounded up: narrow ones
    most.
    """
    side = recipe.side
    most_width, most_height = limit.width or 1 << 16, limit.height or 1 << 16
    if max(most_width, most_height) <= _RATIOS * min(most_width, most_height):
        yield most_width, most_height
    most = min(_most_of_frame(recipe, kind, options), most_tokens)
    # The most square one of those with as many tokens comes first.
    for short in range(isqrt(most), 0, -1):
        long = min(most // short, _RATIOS * short)
        for columns, rows in ((long, short), (short, long)):
            # The limit is rounded to whole tokens, too, up or down.
            width, height = min(columns * side, most_width), min(rows * side, most_height)
            if max(width, height) <= _RATIOS * min(width, height):
                yield width, height
    for ratio in range(1, _RATIOS + 1):
        for width, height in ((ratio, 1), (1, ratio)):
            if width <= most_width and height <= most_height:
                yield width, height


def _recipe(raw: Mapping[str, Any], directory: Path, encode: Callable[[str], Sequence[int]]) -> Qwen2VLRecipe:
    return Qwen2VLRecipe.of_files(raw, directory)


QWEN2_VL = Family(
    architectures=("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
    model=LlamaModel,
    fields=qwen2_vl_fields,
    text_config=text_config,
    open_files=QwenVLFiles,
    recipe=_recipe,
    encoder=QwenEncoder,
)
