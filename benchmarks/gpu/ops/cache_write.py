"""Writing the keys and values of a step to the KV cache, in bf16 and quantized, beside PyTorch's indexed assignment."""

import torch

from benchmarks.gpu.ops._bandwidth import measure, token_counts
from benchmarks.gpu.report import Report
from kernels.kv_cache.layout import gpu_cache_shape
from kernels.kv_cache.write import reference
from kernels.kv_cache.write.triton import cache_write

_BLOCK_SIZE = 16


def run(report: Report, *, toy: bool) -> None:
    num_kv_heads, head_size = (2, 64) if toy else (8, 128)
    for num_tokens in token_counts(toy):
        for dtype in (torch.bfloat16, torch.float8_e4m3fn):
            _write(report, num_tokens, num_kv_heads, head_size, dtype)


def _write(report: Report, num_tokens: int, num_kv_heads: int, head_size: int, dtype: torch.dtype) -> None:
    case = f"{num_tokens} x {num_kv_heads} x {head_size} {'bf16' if dtype is torch.bfloat16 else 'e4m3'}"
    num_blocks = num_tokens // _BLOCK_SIZE * 2 + 4
    shape = gpu_cache_shape(
        num_blocks=num_blocks, block_size=_BLOCK_SIZE, num_kv_heads=num_kv_heads, head_size=head_size
    )
    cache = torch.zeros(shape, device=report.device, dtype=torch.float32).to(dtype)
    heads = torch.randn(num_tokens, 3 + 2 * num_kv_heads, head_size, device=report.device).bfloat16()
    k, v = heads[:, 3 : 3 + num_kv_heads], heads[:, 3 + num_kv_heads :]
    slots = torch.randperm(num_blocks * _BLOCK_SIZE, device=report.device)[:num_tokens]
    scale = None if dtype is torch.bfloat16 else torch.full((num_kv_heads,), 0.02, device=report.device)

    expected, few = cache.cpu(), slots[:3].cpu()
    host_scale = None if scale is None else scale.cpu()
    reference.gpu_cache_write(k[:3].cpu(), v[:3].cpu(), expected, few, host_scale, host_scale)
    cache_write(k, v, cache, slots[:3], k_scale=scale, v_scale=scale)
    where = (few // _BLOCK_SIZE, slice(None), slice(None), few % _BLOCK_SIZE)
    report.check("cache_write", case, cache.cpu()[where].float(), expected[where].float(), rtol=0, atol=0)

    num_bytes = 2 * k.numel() * (k.element_size() + cache.element_size())
    measure(
        report, "cache_write", case, "triton", num_bytes,
        lambda: cache_write(k, v, cache, slots, k_scale=scale, v_scale=scale),
    )  # fmt: skip
    if scale is None:
        blocks, offsets = slots // _BLOCK_SIZE, slots % _BLOCK_SIZE

        def assign() -> None:
            cache[blocks, 0, :, offsets] = k
            cache[blocks, 1, :, offsets] = v

        measure(report, "cache_write", case, "torch", num_bytes, assign)
