"""Idefics3 (arXiv 2408.12637) and SmolVLM: a Llama, with a vision tower: SigLIP (arXiv 2303.15343) over each tile of an
image, then squares of patches side by side as one vector (pixel shuffle), projected to the language model's width.

Legend: I tiles, N patches, E width, M embeddings.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from configs.groups.media import ItemLimits, ProcessorOptions
from kernels.attention.packed import PackedAttention
from kernels.backend import Backend
from protos.inference_pb2 import ITEM_KIND_IMAGE, ItemData
from runtime.media.recipes.idefics3 import Idefics3Recipe
from runtime.media.recipes.preprocessor import read_preprocessor
from runtime.media.recipes.recipe import ItemSize, Recipe
from worker.encoders.encoder import Encoder, ItemError, Pixels
from worker.encoders.pixels import Frames, array_of, resample_of, resized, scale_of_values, valued
from worker.encoders.tower import (
    Activation,
    FloatsReader,
    LayerNorm,
    Ranks,
    TowerAttention,
    TowerBlock,
    TowerMlp,
    TowerShape,
    activation_of,
    attention_shapes,
    mlp_shapes,
    undivided,
)
from worker.encoders.vision_files import VisionFiles
from worker.layers.linear import linear_shapes, load_linear
from worker.models.families.llama import LlamaModel, llama_fields
from worker.models.family import Family
from worker.weights.reader import Shape, WeightReader

_MEAN = _STD = (0.5, 0.5, 0.5)
# Patches that the tower computes at a time, in whole tiles.
_PATCHES = 4096


def text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the language model's settings. Raises ValueError if it is no Llama."""
    text = dict(raw.get("text_config") or {})
    kind = text.get("model_type", "llama")
    if kind != "llama":
        raise ValueError(f"text_config model_type={kind!r} is not supported; llama is")
    if text.get("hidden_act", "silu") != "silu":
        raise ValueError(f"text_config hidden_act={text['hidden_act']!r} is not supported; silu is")
    return {
        **text,
        "image_token_id": raw.get("image_token_id", 128257),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        "eos_token_id": text.get("eos_token_id", raw.get("eos_token_id")),
        "max_position_embeddings": text.get("max_position_embeddings", 2048),
        "rms_norm_eps": text.get("rms_norm_eps", 1e-5),
    }


def smolvlm_fields(raw: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """raw: from `text_config`."""
    return {
        **llama_fields(raw, num_layers),
        "embedded_token_ids": frozenset((int(raw["image_token_id"]),)),
        "left_out": ("vision_model.", "connector."),
    }


class SmolVLMFiles(VisionFiles):
    """Presents tensors under the names of the language model's family."""

    prefixes = (
        ("model.text_model.", "model."),
        ("model.vision_model.", "vision_model."),
        ("model.connector.", "connector."),
    )
    flattened = ("vision_model.embeddings.patch_embedding.weight",)


@dataclass(frozen=True, slots=True, kw_only=True)
class SiglipConfig:
    shape: TowerShape
    patch_size: int
    # Patches of a tile's side, and of the side of a square that becomes one embedding.
    side: int
    scale: int
    # The language model's hidden size.
    out_size: int
    activation: Activation
    eps: float

    @property
    def patch_numbers(self) -> int:
        return 3 * self.patch_size**2


def siglip_config(raw: Mapping[str, Any], out_size: int) -> SiglipConfig:
    """Reads a config.json. Its vision_config leaves out what is as in transformers' classes. Raises ValueError."""
    vision = raw.get("vision_config") or {}
    patch_size, image_size = int(vision.get("patch_size", 32)), int(vision.get("image_size", 224))
    if int(vision.get("num_channels", 3)) != 3:
        raise ValueError(f"vision_config num_channels={vision['num_channels']} is not supported; 3 is")
    scale = int(raw.get("scale_factor", 2))
    if image_size // patch_size % scale:
        raise ValueError(
            f"scale_factor={scale} does not divide the {image_size // patch_size} patches of a tile's side"
        )
    return SiglipConfig(
        shape=TowerShape(
            width=int(vision.get("hidden_size", 1152)),
            num_layers=int(vision.get("num_hidden_layers", 12)),
            num_heads=int(vision.get("num_attention_heads", 16)),
            intermediate_size=int(vision.get("intermediate_size", 3072)),
        ),
        patch_size=patch_size,
        side=image_size // patch_size,
        scale=scale,
        out_size=out_size,
        activation=activation_of(vision.get("hidden_act", "gelu_pytorch_tanh")),
        eps=float(vision.get("layer_norm_eps", 1e-6)),
    )


class SiglipTower:
    def __init__(self, config: SiglipConfig, reader: WeightReader, backend: Backend) -> None:
        self.ranks, self._config, self._backend = Ranks(), config, backend
        shape, whole, eps = config.shape, undivided(backend), config.eps
        of_layers = shape.backend_of(backend)
        self._embed = load_linear(reader, ["vision_model.embeddings.patch_embedding"], bias=True, backend=whole)
        places_N = _places(config.side)
        self._places_NE = reader.float32("vision_model.embeddings.position_embedding.weight")[
            places_N.to(backend.device)
        ]
        self._blocks = [
            TowerBlock(
                (
                    LayerNorm(f"{prefix}.layer_norm1", eps, reader, backend),
                    LayerNorm(f"{prefix}.layer_norm2", eps, reader, backend),
                ),
                TowerAttention(shape, _attention(prefix), reader, of_layers, self.ranks),
                TowerMlp(
                    shape, (f"{prefix}.mlp.fc1", f"{prefix}.mlp.fc2"), config.activation, reader, of_layers, self.ranks
                ),
            )
            for prefix in _prefixes(config)
        ]
        self._norm = LayerNorm("vision_model.post_layernorm", eps, reader, backend)
        self._projection = load_linear(reader, ["connector.modality_projection.proj"], bias=False, backend=whole)

    @property
    def num_bytes(self) -> int:
        ends = self._embed.num_bytes + self._projection.num_bytes + self._places_NE.nbytes
        return ends + sum(block.num_bytes for block in self._blocks)

    def __call__(self, patches_N: torch.Tensor) -> torch.Tensor:
        """Returns float32 [M, out_size]. patches_N: float32, a row of numbers for each patch of some tiles, row by row.
        A tile's result does not depend on the others."""
        config = self._config
        x_NE = self._embed(patches_N.to(self._backend.compute_dtype)).float()
        x_NE.unflatten(0, (-1, len(self._places_NE))).add_(self._places_NE)
        attention = PackedAttention(range(0, len(x_NE) + 1, len(self._places_NE)), self._backend)
        for block in self._blocks:
            block.add_to_(x_NE, attention)
        side, scale = config.side // config.scale, config.scale
        squares = self._norm(x_NE).view(-1, side, scale, side, scale, config.shape.width).permute(0, 1, 3, 2, 4, 5)
        return self._projection(squares.reshape(-1, scale**2 * config.shape.width)).float()


def _places(side: int) -> torch.Tensor:
    """Returns the row of the position embeddings of each patch, int64 [N].

    transformers computes it from fractions in float32, so that some patches of a whole tile may get the embedding of a
    neighbour; the models are trained that way.
    """
    boundaries = torch.arange(1 / side, 1.0, 1 / side)
    fractions = torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))
    row = torch.bucketize(fractions.clamp(max=1.0 - 1e-6), boundaries, right=True)
    return (row[:, None] * side + row).flatten()


def siglip_shapes(config: SiglipConfig) -> dict[str, Shape]:
    """Returns the shapes of all tensors, by the names that SmolVLMFiles presents."""
    shape, scale = config.shape, config.scale
    embeddings = "vision_model.embeddings"
    shapes: dict[str, Shape] = {
        f"{embeddings}.patch_embedding.weight": (shape.width, config.patch_numbers),
        f"{embeddings}.patch_embedding.bias": (shape.width,),
        f"{embeddings}.position_embedding.weight": (config.side**2, shape.width),
    }
    for prefix in _prefixes(config):
        for norm in ("layer_norm1", "layer_norm2"):
            shapes |= LayerNorm.shapes(f"{prefix}.{norm}", shape.width)
        shapes |= attention_shapes(f"{prefix}.self_attn", shape, ("q_proj", "k_proj", "v_proj", "out_proj"))
        shapes |= mlp_shapes(f"{prefix}.mlp", shape, ("fc1",), "fc2")
    shapes |= LayerNorm.shapes("vision_model.post_layernorm", shape.width)
    projection = {"proj": (shape.width * scale**2, config.out_size)}
    return shapes | linear_shapes("connector.modality_projection", projection)


def _prefixes(config: SiglipConfig) -> list[str]:
    return [f"vision_model.encoder.layers.{layer}" for layer in range(config.shape.num_layers)]


def _attention(prefix: str) -> tuple[str, str, str, str]:
    attention = f"{prefix}.self_attn"
    return f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj", f"{attention}.out_proj"


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

    def prepare(self, data: ItemData) -> Pixels:
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

    def encode(self, prepared: Pixels) -> torch.Tensor:
        """See Encoder."""
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

    def dummy(self, size: ItemSize) -> Pixels:
        """See Encoder."""
        side = self._recipe.tile_size
        return self._pixels(torch.zeros(self._recipe.tiling(size).num_tiles, side, side, 3, dtype=torch.uint8))

    def _pixels(self, tiles: torch.Tensor) -> Pixels:
        return Pixels(frames=tiles, num_embeddings=len(tiles) * self._recipe.tile_embeddings)


SMOLVLM = Family(
    architectures=("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"),
    model=LlamaModel,
    fields=smolvlm_fields,
    text_config=text_config,
    open_files=SmolVLMFiles,
    recipe=Idefics3Recipe.of_files,
    encoder=SmolVLMEncoder,
)
