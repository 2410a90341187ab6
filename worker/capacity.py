"""How many KV blocks a worker has, and how long a sequence may therefore be."""

import logging

import torch

from configs.options import Options
from kernels.shard import ALL_LAYERS, WHOLE, Shard, Stage
from worker.errors import PermanentError
from worker.kv_cache import KVCache
from worker.model_config import ModelConfig

_log = logging.getLogger("octavo.worker")


def resolve_num_blocks(
    options: Options, config: ModelConfig, dtype: torch.dtype, shard: Shard = WHOLE, stage: Stage = ALL_LAYERS
) -> int:
    """Blocks that can be given out at a rank, from num_blocks_override or kv_cache_memory.

    Raises ValueError, naming the option, if there is room for none.
    """
    if options.num_blocks_override:
        return options.num_blocks_override
    num_blocks = KVCache.num_blocks_for(
        config,
        num_bytes=int(options.kv_cache_memory * 2**30),
        block_size=options.block_size,
        dtype=dtype,
        shard=shard,
        stage=stage,
    )
    return num_blocks - 1


def resolve_num_swap_blocks(
    options: Options, config: ModelConfig, dtype: torch.dtype, shard: Shard = WHOLE, stage: Stage = ALL_LAYERS
) -> int:
    """Host blocks for swapped KV: those that swap_space holds, or none if preemption_mode does not ask for them.

    Raises PermanentError, naming the option, if there is room for none.
    """
    if options.preemption_mode != "swap":
        return 0
    size = KVCache.block_bytes(config, options.block_size, dtype, shard, stage)
    num_blocks = int(options.swap_space * 2**30) // size
    if not num_blocks:
        raise PermanentError(
            f"swap_space={options.swap_space:g} GiB holds no KV block of {size / 2**20:.3g} MiB: give at least "
            f"{size / 2**30:.4g}, or preemption_mode=recompute"
        )
    return num_blocks


def longest_sequence(options: Options, config: ModelConfig) -> int:
    """max_model_len as asked for, or the model's context. Raises PermanentError for more than that."""
    context = config.max_position_embeddings
    if options.max_model_len > context:
        raise PermanentError(
            f"max_model_len={options.max_model_len} is beyond the model's context length: use {context} or less"
        )
    return options.max_model_len or context


def resolve_max_model_len(options: Options, config: ModelConfig, num_blocks: int, *, on_gpu: bool = False) -> int:
    """max_model_len as asked for, or the model's context as far as the KV cache holds it (a cut is logged).

    on_gpu: gpu_memory_utilization says how large the cache is, not kv_cache_memory. Raises PermanentError, naming the
    option, for a length that the model or the cache cannot hold.
    """
    longest, held = longest_sequence(options, config), num_blocks * options.block_size
    if held >= longest:
        return longest
    cache_option = _cache_option(options, on_gpu=on_gpu)
    if options.max_model_len:
        raise PermanentError(
            f"max_model_len={options.max_model_len} does not fit into {num_blocks} KV blocks of {options.block_size} "
            f"tokens: use {held} or less, or raise {cache_option}"
        )
    _log.warning(
        "max_model_len is %d, not the model's %d: the KV cache has %d blocks of %d tokens; raise %s for more",
        held, longest, num_blocks, options.block_size, cache_option,
    )  # fmt: skip
    return held


def _cache_option(options: Options, *, on_gpu: bool) -> str:
    if options.num_blocks_override:
        return f"num_blocks_override={options.num_blocks_override}"
    if on_gpu:
        return f"gpu_memory_utilization={options.gpu_memory_utilization:g}"
    return f"kv_cache_memory={options.kv_cache_memory:g}"
