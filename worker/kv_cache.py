"""The keys and values of every token in flight, in blocks that sequences share and recycle."""

import math

import torch

from kernels.compute_path import ComputePath
from kernels.native.memory import huge_zeros
from kernels.shard import ALL_LAYERS, WHOLE, Shard, Stage
from worker.local_heads import LocalHeads
from worker.model_config import ModelConfig

BLOCK_SIZES = (8, 16, 32)
GPU_BLOCK_SIZES = (*BLOCK_SIZES, 64, 128)


class KVCache:
    """KV blocks of all layers of a stage.

    A layer's cache is [num_blocks, block_size, 2, num_kv_heads, head_size], and a block is one contiguous run. In which
    order the numbers of a block lie is the business of the kernels that write and read them: PyTorch's path has them as
    the shape says, a token's keys and values side by side; the C++ path as kernels/paged_attention/cache_layout.h says.
    On a GPU it is [num_blocks, 2, num_kv_heads, block_size, head_size]: kernels/paged_attention/gpu_cache.py.
    Of a model with latent attention it is [num_blocks, block_size, latent size + rope size], for all heads, on each
    rank: kernels/mla_attention/gpu_cache.py.
    Block 0 is the null block: block tables are padded with it, it is never given out, and it stays finite.
    """

    def __init__(self, config: ModelConfig, *, num_blocks: int, block_size: int, path: ComputePath) -> None:
        """num_blocks counts the null block. Raises ValueError for a block size or count that cannot work."""
        block_sizes = BLOCK_SIZES if path.gpu is None else GPU_BLOCK_SIZES
        if block_size not in block_sizes:
            raise ValueError(f"block_size={block_size} must be one of {', '.join(map(str, block_sizes))}")
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks}: at least 2 are needed, the null block and one to give out")
        self.block_size = block_size
        numbers = path.stage.layers(config.num_layers)
        self._first_layer = numbers.start
        dtype = path.kv_cache_dtype
        block_shape = _block_shape(config, block_size, path.shard, on_gpu=path.gpu is not None)
        # Zeros, not empty: attention multiplies masked entries by a weight of 0, which leaves NaN what it was. On a GPU
        # what is masked is not read, but this takes the memory now, not in some step.
        if path.gpu is not None:
            self.layers = [torch.zeros((num_blocks, *block_shape), dtype=dtype, device=path.device) for _ in numbers]
        else:
            self.layers = [huge_zeros((num_blocks, *block_shape), dtype) for _ in numbers]

    def of_layer(self, number: int) -> torch.Tensor:
        """The cache of one of the stage's layers, which are numbered as in the whole model."""
        return self.layers[number - self._first_layer]

    @property
    def num_blocks(self) -> int:
        """Blocks, the null block included."""
        return self.layers[0].shape[0]

    @staticmethod
    def block_bytes(
        config: ModelConfig, block_size: int, dtype: torch.dtype, shard: Shard = WHOLE, stage: Stage = ALL_LAYERS
    ) -> int:
        """Bytes of one block over all layers of a stage, at a rank."""
        num_layers = len(stage.layers(config.num_layers))
        return num_layers * math.prod(_block_shape(config, block_size, shard)) * dtype.itemsize

    @staticmethod
    def num_blocks_for(
        config: ModelConfig,
        *,
        num_bytes: int,
        block_size: int,
        dtype: torch.dtype,
        shard: Shard = WHOLE,
        stage: Stage = ALL_LAYERS,
    ) -> int:
        """Blocks, the null block included, that fit into num_bytes.

        Raises ValueError, naming the option, if those are fewer than 2.
        """
        size = KVCache.block_bytes(config, block_size, dtype, shard, stage)
        num_blocks = num_bytes // size
        if num_blocks < 2:
            raise ValueError(
                f"kv_cache_memory={num_bytes / 2**30:.4g} GiB holds {num_blocks} blocks of {size / 2**20:.3g} MiB; "
                f"at least {2 * size / 2**30:.4g} GiB is needed"
            )
        return num_blocks


def _block_shape(config: ModelConfig, block_size: int, shard: Shard, *, on_gpu: bool = False) -> tuple[int, ...]:
    """Of one layer's block, at a rank."""
    if config.latent is not None:
        return block_size, config.latent.entry_size
    num_kv_heads = LocalHeads(config, shard).shape.num_kv_heads
    if on_gpu:
        return 2, num_kv_heads, block_size, config.head_size
    return block_size, 2, num_kv_heads, config.head_size
