"""The KV cache: its blocks, and the heads that a rank stores in it."""

import math
from dataclasses import dataclass

import torch

from kernels.backend import Backend
from kernels.kv_cache.layout import HeadShape
from kernels.native.memory import huge_zeros
from kernels.shard import ALL_LAYERS, WHOLE, Shard, Stage
from worker.model_config import ModelConfig


class LocalHeads:
    """A rank's heads and the KV heads that they read. If there are fewer KV heads than ranks, several ranks hold the
    same one."""

    def __init__(self, config: ModelConfig, shard: Shard) -> None:
        """Raises ValueError, naming the option, for sizes that don't fit."""
        num_heads, num_kv_heads, size = config.num_heads, config.num_kv_heads, shard.size
        if num_heads % size or (num_kv_heads % size and size % num_kv_heads):
            valid = [
                each
                for each in range(1, num_heads + 1)
                if num_heads % each == 0 and (num_kv_heads % each == 0 or each % num_kv_heads == 0)
            ]
            raise ValueError(
                f"tensor_parallel_size={size} does not fit {num_heads} heads on {num_kv_heads} KV heads; "
                f"{', '.join(map(str, valid))} do"
            )
        self.head_size = config.head_size
        self.heads = shard.of(num_heads, "num_attention_heads")
        first_kv_head = shard.rank * num_kv_heads // size
        self.kv_heads = slice(first_kv_head, first_kv_head + max(1, num_kv_heads // size))

    @property
    def shape(self) -> HeadShape:
        return HeadShape(
            num_heads=self.heads.stop - self.heads.start,
            num_kv_heads=self.kv_heads.stop - self.kv_heads.start,
            head_size=self.head_size,
        )

    def rows_of(self, projection: str) -> slice:
        """This rank's outputs of q, k or v; those of q are also its inputs of the output projection."""
        heads = self.heads if projection == "q" else self.kv_heads
        return slice(heads.start * self.head_size, heads.stop * self.head_size)


BLOCK_SIZES = (8, 16, 32)
GPU_BLOCK_SIZES = (*BLOCK_SIZES, 64, 128)
# For models with layers that carry a state: each block has a slot for it, so large states need large blocks.
STATE_BLOCK_SIZES = (*GPU_BLOCK_SIZES, 256, 512, 1024)


class KVCache:
    """KV blocks of all layers of a stage.

    On a CPU, a layer's cache is [num_blocks, block_size, 2, num_kv_heads, head_size], and a block is one contiguous
    run. The kernels decide the order of the numbers within a block: PyTorch's backend follows the shape, with a token's
    keys and values side by side; the C++ path follows kernels/kv_cache/cache_layout.h.
    On a GPU it is [num_blocks, 2, num_kv_heads, block_size, head_size]: kernels/kv_cache/layout.py.
    With latent attention it is [num_blocks, block_size, latent size + rope size], for all heads, on each rank:
    kernels/kv_cache/layout.py.
    A layer that carries a state from token to token has [num_blocks, numbers of a state], float32: the state after the
    last token that is computed in the block (kernels/attention/recurrent/recurrent.h). It no longer changes once the
    block is full, so whatever finds a full block finds the state to go on from.
    Block 0 is the null block: it pads block tables, is never allocated, and stays finite.
    """

    def __init__(self, config: ModelConfig, *, num_blocks: int, block_size: int, backend: Backend) -> None:
        """num_blocks counts the null block. Raises ValueError for a block size or count that cannot work."""
        block_sizes = block_sizes_of(config, on_gpu=backend.gpu is not None)
        if block_size not in block_sizes:
            raise ValueError(f"block_size={block_size} must be one of {', '.join(map(str, block_sizes))}")
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks}: at least 2 are needed, the null block and one to allocate")
        self.block_size = block_size
        numbers = backend.stage.layers(config.num_layers)
        self._first_layer = numbers.start
        # The dtype of keys and values.
        self.dtype = backend.kv_cache_dtype
        on_gpu = backend.gpu is not None
        layers = [_layer(config, number, block_size, self.dtype, backend.shard, on_gpu=on_gpu) for number in numbers]
        # Zeros, not empty: attention multiplies masked entries by a weight of 0, and 0 * NaN is NaN. On a GPU, masked
        # entries are not read, but zeroing allocates the memory now rather than in some step.
        if backend.gpu is not None:
            self.layers = [
                torch.zeros((num_blocks, *shape), dtype=dtype, device=backend.device) for shape, dtype in layers
            ]
        else:
            self.layers = [huge_zeros((num_blocks, *shape), dtype) for shape, dtype in layers]

    def of_layer(self, number: int) -> torch.Tensor:
        """The cache of one of the stage's layers; layers are numbered as in the whole model."""
        return self.layers[number - self._first_layer]

    @property
    def num_blocks(self) -> int:
        """The number of blocks, including the null block."""
        return self.layers[0].shape[0]

    @staticmethod
    def block_bytes(
        config: ModelConfig, block_size: int, dtype: torch.dtype, shard: Shard = WHOLE, stage: Stage = ALL_LAYERS
    ) -> int:
        """Bytes of one block over all layers of a stage, on one rank."""
        layers = (_layer(config, number, block_size, dtype, shard) for number in stage.layers(config.num_layers))
        return sum(math.prod(shape) * each.itemsize for shape, each in layers)

    @staticmethod
    def num_blocks_for(
        config: ModelConfig,
        *,
        num_bytes: int,
        block_size: int,
        dtype: torch.dtype,
        shard: Shard = WHOLE,
        stage: Stage = ALL_LAYERS,
        drafter: "DrafterBlocks | None" = None,
    ) -> int:
        """Returns how many blocks, including the null block, fit into num_bytes, beside those of a drafter.

        Raises ValueError, naming the option, if fewer than 2 do.
        """
        size = KVCache.block_bytes(config, block_size, dtype, shard, stage)
        if drafter is not None:
            size, num_bytes = size + drafter.block_bytes, num_bytes - drafter.num_spare * drafter.block_bytes
        num_blocks = max(0, num_bytes // size)
        if num_blocks < 2:
            raise ValueError(
                f"kv_cache_memory={num_bytes / 2**30:.4g} GiB holds {num_blocks} blocks of {size / 2**20:.3g} MiB; "
                f"at least {2 * size / 2**30:.4g} GiB is needed"
            )
        return num_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterBlocks:
    """The KV cache of a drafter: it has as many blocks as the model's, and num_spare more."""

    block_bytes: int
    num_spare: int


def block_sizes_of(config: ModelConfig, *, on_gpu: bool) -> tuple[int, ...]:
    """The block sizes that work for a model."""
    if config.recurrence is not None:
        return STATE_BLOCK_SIZES
    return GPU_BLOCK_SIZES if on_gpu else BLOCK_SIZES


def automatic_block_size(config: ModelConfig, dtype: torch.dtype, least: int) -> int:
    """Returns the smallest size from `least` on with which a block's states take no more memory than its KV, or 512 if
    that is less. Larger blocks hold more tokens for each state; smaller ones find longer common prefixes. Every rank
    gets the same size. dtype: of keys and values."""
    if config.recurrence is None:
        return least
    with_one, with_two = (KVCache.block_bytes(config, size, dtype) for size in (1, 2))
    kv, most = with_two - with_one, max(least, _MOST_AUTOMATIC)
    sizes = (size for size in STATE_BLOCK_SIZES if least <= size < most)
    return next((size for size in sizes if with_one - kv <= size * kv), most)


_MOST_AUTOMATIC = 512


def _layer(
    config: ModelConfig, number: int, block_size: int, dtype: torch.dtype, shard: Shard, *, on_gpu: bool = False
) -> tuple[tuple[int, ...], torch.dtype]:
    """Returns the shape of a layer's block on one rank, and the dtype of its numbers."""
    if config.recurrence is not None and config.has_state(number):
        return (config.recurrence.shape_of(shard).slot,), torch.float32
    return _block_shape(config, block_size, shard, on_gpu=on_gpu), dtype


def _block_shape(config: ModelConfig, block_size: int, shard: Shard, *, on_gpu: bool = False) -> tuple[int, ...]:
    """Returns the shape of one layer's block on one rank."""
    if config.latent is not None:
        return block_size, config.latent.entry_size
    num_kv_heads = LocalHeads(config, shard).shape.num_kv_heads
    if on_gpu:
        return 2, num_kv_heads, block_size, config.head_size
    return block_size, 2, num_kv_heads, config.head_size
