"""Rope alone, and fused with head norms and the write into the KV cache."""

import torch

from benchmarks.gpu.ops._bandwidth import measure, num_bytes_of, token_counts
from benchmarks.gpu.report import Report
from kernels.elementwise.rope import reference
from kernels.elementwise.rope.triton import cos_sin_rows, rope_
from kernels.kv_cache.layout import gpu_cache_shape
from kernels.kv_cache.write.triton import HeadNorms, rope_cache_write

_BLOCK_SIZE = 16


def run(report: Report, *, toy: bool) -> None:
    num_heads, num_kv_heads, head_size = (3, 1, 64) if toy else (32, 8, 128)
    for num_tokens in token_counts(toy):
        _step(report, num_tokens, num_heads, num_kv_heads, head_size)


def _step(report: Report, num_tokens: int, num_heads: int, num_kv_heads: int, head_size: int) -> None:
    case = f"{num_tokens} x {num_heads} + {num_kv_heads} heads of {head_size}"
    row = (num_heads + 2 * num_kv_heads) * head_size
    qkv = torch.randn(num_tokens, row, device=report.device).bfloat16()
    heads = qkv.unflatten(1, (-1, head_size))
    q, k = heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads]
    positions = torch.randint(8192, (num_tokens,), device=report.device)
    frequencies = 1.0 / 500000.0 ** (torch.arange(0, head_size, 2, device=report.device) / head_size)
    cos_sin = cos_sin_rows(positions, frequencies)

    expected = reference.rope(q[:3].cpu(), positions[:3].cpu(), frequencies.cpu(), 1.0)
    out = qkv[:3].clone().unflatten(1, (-1, head_size))
    rope_(out[:, :num_heads], out[:, num_heads : num_heads + num_kv_heads], cos_sin)
    # A float32 angle at position 8191 has an error of up to 2^-12, times numbers up to 6.
    report.check("rope", case, out[:, :num_heads], expected, rtol=2**-7.9, atol=3e-3)

    measure(report, "rope", case, "rope", 2 * num_bytes_of(q, k), lambda: rope_(q, k, cos_sin))
    measure(
        report,
        "rope",
        case,
        "cos_sin",
        num_bytes_of(positions, cos_sin),
        lambda: cos_sin_rows(positions, frequencies, out=cos_sin),
    )
    num_blocks = num_tokens // _BLOCK_SIZE + 1
    shape = gpu_cache_shape(
        num_blocks=num_blocks, block_size=_BLOCK_SIZE, num_kv_heads=num_kv_heads, head_size=head_size
    )
    cache = torch.zeros(shape, device=report.device, dtype=torch.bfloat16)
    slots = torch.randperm(num_blocks * _BLOCK_SIZE, device=report.device)[:num_tokens]
    weight = torch.ones(head_size, device=report.device)
    for way, norms in (("into the cache", None), ("norms, cache", HeadNorms(weight, weight, 1e-6))):
        measure(
            report,
            "rope",
            case,
            way,
            2 * num_bytes_of(qkv),
            lambda norms=norms: rope_cache_write(qkv, cos_sin, cache, slots, num_heads=num_heads, head_norms=norms),
        )
