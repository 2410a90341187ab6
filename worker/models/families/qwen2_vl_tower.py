"""The vision tower of Qwen2-VL (arXiv 2409.12191) and Qwen2.5-VL (arXiv 2502.13923).

A 2D rope tells patches apart. In Qwen2.5-VL most layers see windows of patches, in Qwen2-VL all see a whole frame.

Legend: N patches, E width, M merged patches, P pairs that rope rotates.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from kernels.attention.packed import PackedAttention
from kernels.backend import Backend
from worker.encoders.tower import (
    Activation,
    LayerNorm,
    Ranks,
    RmsNorm,
    TowerAttention,
    TowerBlock,
    TowerMlp,
    TowerNorm,
    TowerShape,
    activation_of,
    attention_shapes,
    mlp_shapes,
    through,
    undivided,
)
from worker.layers.linear import linear_shapes, load_linear
from worker.weights.reader import Shape, WeightReader

_EPS, _THETA = 1e-6, 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenTowerConfig:
    shape: TowerShape
    # Numbers of a patch, and patches of a merged one.
    patch_numbers: int
    merge_size: int
    # The language model's hidden size.
    out_size: int
    # None: MLPs have gates of silu, and norms are RMS norms.
    activation: Activation | None
    # Merged patches of the side of a window; 0: no layer has windows.
    window: int
    # Layers that see whole frames, where others have windows.
    whole_layers: frozenset[int]
    theta: float


def tower_config(raw: Mapping[str, Any], out_size: int) -> QwenTowerConfig:
    """Reads a config.json. Its vision_config leaves out what is as in transformers' classes. Raises ValueError."""
    vision, is_2_5 = raw.get("vision_config") or {}, raw.get("model_type") == "qwen2_5_vl"
    width = int(vision.get("hidden_size", 3584)) if is_2_5 else int(vision.get("embed_dim", 1280))
    shape = TowerShape(
        width=width,
        num_layers=int(vision.get("depth", 32)),
        num_heads=int(vision.get("num_heads", 16)),
        intermediate_size=int(vision.get("intermediate_size", 3420))
        if is_2_5
        else int(width * vision.get("mlp_ratio", 4)),
    )
    if shape.head_size % 4:
        raise ValueError(f"vision_config has heads of {shape.head_size} numbers: 2D rope needs a multiple of 4")
    patch, merge = int(vision.get("patch_size", 14)), int(vision.get("spatial_merge_size", 2))
    given = int(vision.get("out_hidden_size", 3584) if is_2_5 else vision.get("hidden_size", 3584))
    if given != out_size:
        raise ValueError(
            f"the vision tower's output has {given} numbers, the language model {out_size}: they must agree"
        )
    act, window = vision.get("hidden_act", "silu" if is_2_5 else "quick_gelu"), 0
    if is_2_5:
        if act != "silu":
            raise ValueError(f"vision_config hidden_act={act!r} is not supported; silu is")
        window = int(vision.get("window_size", 112)) // merge // patch
        if window < 1:
            raise ValueError(
                f"vision_config window_size={vision['window_size']} is smaller than {merge * patch} pixels"
            )
    return QwenTowerConfig(
        shape=shape,
        patch_numbers=int(vision.get("in_channels", 3)) * int(vision.get("temporal_patch_size", 2)) * patch**2,
        merge_size=merge,
        out_size=out_size,
        activation=None if is_2_5 else activation_of(act),
        window=window,
        whole_layers=frozenset(vision.get("fullatt_block_indexes", (7, 15, 23, 31))) if is_2_5 else frozenset(),
        theta=float((vision.get("rope_parameters") or {}).get("rope_theta", _THETA)),
    )


class QwenTower:
    def __init__(self, config: QwenTowerConfig, reader: WeightReader, backend: Backend) -> None:
        self.ranks, self._config, self._backend = Ranks(), config, backend
        of_layers = config.shape.backend_of(backend)
        norm: type[TowerNorm] = RmsNorm if config.activation is None else LayerNorm
        # The embedding of patches and the merger are small: each rank has all of them.
        whole = undivided(backend)
        self._embed = load_linear(reader, ["visual.patch_embed.proj"], bias=False, backend=whole)
        self._blocks = [
            TowerBlock(
                (norm(f"{prefix}.norm1", _EPS, reader, backend), norm(f"{prefix}.norm2", _EPS, reader, backend)),
                TowerAttention(config.shape, _attention(prefix), reader, of_layers, self.ranks),
                TowerMlp(config.shape, _mlp(prefix, config), config.activation, reader, of_layers, self.ranks),
            )
            for prefix in _prefixes(config)
        ]
        self._merger_norm = norm("visual.merger.ln_q", _EPS, reader, backend)
        self._merger = [load_linear(reader, [f"visual.merger.mlp.{i}"], bias=True, backend=whole) for i in (0, 2)]
        pairs = config.shape.head_size // 4
        self._frequencies_P = (1.0 / config.theta ** (torch.arange(pairs, dtype=torch.float32) / pairs)).to(
            backend.device
        )

    @property
    def num_bytes(self) -> int:
        ends = (self._embed, *self._merger)
        return sum(linear.num_bytes for linear in ends) + sum(block.num_bytes for block in self._blocks)

    def embed(self, patches_N: torch.Tensor) -> torch.Tensor:
        """Returns the stream, float32 [N, E]. patches_N: float32, a row of numbers for each patch; patches of a merged
        one follow each other."""
        return self._embed(patches_N.to(self._backend.compute_dtype)).float()

    def __call__(self, x_NE: torch.Tensor, grid: tuple[int, int, int]) -> torch.Tensor:
        """Returns float32 [M, out_size]. x_NE: from `embed`, changed by this call. grid: merged patches along time,
        height and width."""
        config, unit = self._config, self._config.merge_size**2
        places_N2 = _places(grid, config.merge_size)
        frame = grid[1] * grid[2] * unit
        whole = PackedAttention(range(0, len(x_NE) + 1, frame), self._backend)
        windows, order_M = whole, None
        if config.window:
            order_M, starts = window_order(grid, config.window, unit)
            windows = PackedAttention(starts, self._backend)
            device_order_M = torch.from_numpy(order_M).to(x_NE.device)
            x_NE = x_NE.unflatten(0, (-1, unit))[device_order_M].flatten(0, 1)
            places_N2 = places_N2.reshape(-1, unit, 2)[order_M].reshape(-1, 2)
        cos_sin = self._cos_sin(torch.from_numpy(places_N2).to(x_NE.device))
        for layer, block in enumerate(self._blocks):
            block.add_to_(x_NE, whole if layer in config.whole_layers else windows, cos_sin)
        merged = self._merger_norm(x_NE).view(len(x_NE) // unit, -1)
        out_ME = through(self._merger[0], F.gelu, self._merger[1], merged).float()
        if order_M is not None:
            out_ME = out_ME[torch.from_numpy(np.argsort(order_M)).to(x_NE.device)]
        return out_ME

    def _cos_sin(self, places_N2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Half of a head's pairs turn with the height, half with the width."""
        angles_N1P = (places_N2[:, :, None].float() * self._frequencies_P).flatten(1)[:, None]
        return angles_N1P.cos(), angles_N1P.sin()


def tower_shapes(config: QwenTowerConfig) -> dict[str, Shape]:
    """Returns the shapes of all tensors, by the names that QwenVLFiles presents."""
    norm: type[TowerNorm] = RmsNorm if config.activation is None else LayerNorm
    shape, merged = config.shape, config.shape.width * config.merge_size**2
    up = ("gate_proj", "up_proj") if config.activation is None else ("fc1",)
    shapes: dict[str, Shape] = {"visual.patch_embed.proj.weight": (shape.width, config.patch_numbers)}
    for prefix in _prefixes(config):
        shapes |= norm.shapes(f"{prefix}.norm1", shape.width) | norm.shapes(f"{prefix}.norm2", shape.width)
        shapes |= attention_shapes(f"{prefix}.attn", shape, ("q_proj", "k_proj", "v_proj", "proj"))
        shapes |= mlp_shapes(f"{prefix}.mlp", shape, up, "down_proj" if len(up) == 2 else "fc2")
    shapes |= norm.shapes("visual.merger.ln_q", shape.width)
    linears = {"0": (merged, merged), "2": (merged, config.out_size)}
    return shapes | linear_shapes("visual.merger.mlp", linears, bias=("0", "2"))


def window_order(grid: tuple[int, int, int], window: int, unit: int) -> tuple[np.ndarray, list[int]]:
    """Returns the merged patches in the order of windows, int64 [M], and where windows begin, in patches: a list for
    PackedAttention. Windows at the right and the lower edge may be smaller; none spans frames."""
    times, rows, columns = np.indices(grid)
    per_row, per_column = -(-grid[1] // window), -(-grid[2] // window)
    window_M = ((times * per_row + rows // window) * per_column + columns // window).ravel()
    counts = np.bincount(window_M, minlength=grid[0] * per_row * per_column)
    return np.argsort(window_M, kind="stable"), [0, *(counts.cumsum() * unit).tolist()]


def _places(grid: tuple[int, int, int], merge: int) -> np.ndarray:
    """Returns the row and column of each patch in its frame, int64 [N, 2]."""
    times, rows, columns = grid
    inner = np.indices((rows, columns, merge, merge))
    places = np.stack((inner[0] * merge + inner[2], inner[1] * merge + inner[3]), axis=-1).reshape(-1, 2)
    return np.tile(places, (times, 1))


def _prefixes(config: QwenTowerConfig) -> list[str]:
    return [f"visual.blocks.{layer}" for layer in range(config.shape.num_layers)]


def _attention(prefix: str) -> tuple[str, str, str, str]:
    return f"{prefix}.attn.q_proj", f"{prefix}.attn.k_proj", f"{prefix}.attn.v_proj", f"{prefix}.attn.proj"


def _mlp(prefix: str, config: QwenTowerConfig) -> tuple[str, ...]:
    names = ("gate_proj", "up_proj", "down_proj") if config.activation is None else ("fc1", "fc2")
    return tuple(f"{prefix}.mlp.{name}" for name in names)
