from dataclasses import replace

import pytest
import torch

from kernels.backend import Backend, gpu_backend, torch_backend
from kernels.shard import Shard
from worker.layers.kv_cache import KVCache
from worker.model_config import LatentConfig, ModelConfig, RopeConfig


def _config() -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=10,
        hidden_size=8,
        intermediate_size=8,
        num_layers=3,
        num_heads=2,
        num_kv_heads=1,
        head_size=4,
        layer_windows=(0, 0, 0),
        rope=RopeConfig(theta=1e4),
        rms_norm_eps=1e-5,
        max_position_embeddings=64,
    )


LATENT = LatentConfig(query_rank=None, latent_size=16, nope_size=8, rope_size=8, value_size=8, scale=1.0)


@pytest.mark.parametrize("latent", [None, LATENT], ids=["heads", "latents"])
@pytest.mark.parametrize(
    "backend",
    [
        torch_backend(torch.float32),
        gpu_backend(torch.bfloat16, torch.device("cpu")),
        gpu_backend(torch.bfloat16, torch.device("cpu"), kv_cache_dtype=torch.float8_e4m3fn),
    ],
    ids=lambda backend: backend.name,
)
def test_blocks_take_the_bytes_they_are_counted_with(backend: Backend, latent: LatentConfig | None) -> None:
    """An estimate below the truth would let a worker outgrow its kv_cache_memory."""
    config, dtype = replace(_config(), latent=latent), backend.kv_cache_dtype
    num_blocks = KVCache.num_blocks_for(config, num_bytes=10_000, block_size=8, dtype=dtype)
    cache = KVCache(config, num_blocks=num_blocks, block_size=8, backend=backend)
    assert cache.num_blocks == num_blocks
    held = sum(layer.nbytes for layer in cache.layers)
    assert held == num_blocks * KVCache.block_bytes(config, 8, dtype)
    assert held <= 10_000 < held + KVCache.block_bytes(config, 8, dtype)


def test_each_rank_has_all_latents_and_a_part_of_the_kv_heads() -> None:
    heads = replace(_config(), num_kv_heads=2)
    whole, half = (KVCache.block_bytes(heads, 8, torch.float32, Shard(size - 1, size)) for size in (1, 2))
    assert whole == 2 * half
    latents = replace(heads, latent=LATENT)
    assert KVCache.block_bytes(latents, 8, torch.float32, Shard(1, 2)) == 3 * 8 * (16 + 8) * 4


def test_too_little_memory_names_the_option() -> None:
    with pytest.raises(ValueError, match=r"kv_cache_memory=.* holds 1 blocks"):
        KVCache.num_blocks_for(_config(), num_bytes=1000, block_size=8, dtype=torch.float32)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(8, 12), (1, 16)])
def test_block_sizes_and_counts_that_cannot_work(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match=r"block_size=12 must be one of 8, 16, 32|num_blocks=1: at least 2"):
        KVCache(_config(), num_blocks=num_blocks, block_size=block_size, backend=torch_backend(torch.float32))
