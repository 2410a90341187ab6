"""How a GPU's KV cache lies in memory: one layer is one contiguous tensor.

    cache[block, 0 | 1, kv_head, offset, :]    key | value, [N, 2, K, B, D]

    N blocks, K KV heads, B tokens of a block, D head size; slot = block * B + offset

A program reads one KV head of many blocks. So the tokens of one head lie side by side: a block of 16 tokens of head
size 128 in bf16 is 4 KiB in one piece for keys and as much for values, whole lines whatever K is, where token-major
order ([N, B, 2, K, D], what a CPU's PyTorch path has) would give each program 256 bytes of every K * 512. A block as a
whole remains one piece, too, which is what block copies and swaps move. Head sizes are not padded.

The dtype is bf16, fp16, fp32 or e4m3 (`torch.float8_e4m3fn`). With e4m3 there are float32 scales for keys and for
values, each [1] (per tensor) or [K] (per head), on the GPU: number = scale * stored.

Tokens that are padding have slot -1: nothing is written for them. Block 0 is the null block, never given out.
"""

import torch

CACHE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
BLOCK_SIZES = (8, 16, 32, 64, 128)
HEAD_SIZES = (64, 80, 96, 128, 192, 256)


def gpu_cache_shape(
    *, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
) -> tuple[int, int, int, int, int]:
    """Of one layer, [N, 2, K, B, D]."""
    return num_blocks, 2, num_kv_heads, block_size, head_size


def check_gpu_cache(cache: torch.Tensor) -> None:
    """Raises ValueError if `cache` is not one layer in this layout."""
    if cache.dim() != 5 or cache.shape[1] != 2:
        raise ValueError(f"a GPU's KV cache is [num_blocks, 2, kv_heads, block_size, head_size], not {[*cache.shape]}")
    if not cache.is_contiguous():
        raise ValueError(f"a GPU's KV cache is contiguous, not of strides {cache.stride()}")
    if cache.dtype not in CACHE_DTYPES:
        raise ValueError(f"kv_cache_dtype {cache.dtype} is none of {', '.join(map(str, CACHE_DTYPES))}")
    if cache.shape[3] not in BLOCK_SIZES:
        raise ValueError(f"block_size {cache.shape[3]} is none of {', '.join(map(str, BLOCK_SIZES))}")
    if cache.shape[4] not in HEAD_SIZES:
        raise ValueError(f"head size {cache.shape[4]} is none of {', '.join(map(str, HEAD_SIZES))}")


def kernel_view(cache: torch.Tensor) -> torch.Tensor:
    """The cache as kernels take it: e4m3 as its bits, uint8, on a GPU before sm_89, which knows no such type
    (`kernels.tiles.numbers` converts them)."""
    if cache.dtype is torch.float8_e4m3fn and cache.is_cuda and torch.cuda.get_device_capability(cache.device) < (8, 9):
        return cache.view(torch.uint8)
    return cache
