"""The vision tower of Idefics3 (arXiv 2408.12637) and SmolVLM: SigLIP (arXiv 2303.15343) over each tile, then squares
of patches side by side as one vector (pixel shuffle), projected to the language model's width.

Legend: I tiles, N patches, E width, M embeddings.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kernels.attention.packed import PackedAttention
from kernels.backend import Backend
from worker.encoders.tower import (
    Activation,
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
from worker.layers.linear import linear_shapes, load_linear
from worker.weights.reader import Shape, WeightReader


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
