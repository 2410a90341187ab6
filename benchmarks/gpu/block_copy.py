"""Copies of blocks within the KV cache of all layers."""

import torch

from benchmarks.gpu._bandwidth import measure
from benchmarks.gpu.report import Report
from kernels.block_copy.gpu import BlockCopy
from kernels.paged_attention.gpu_cache import gpu_cache_shape


def run(report: Report, *, toy: bool) -> None:
    num_layers, num_blocks = (2, 8) if toy else (32, 1024)
    shape = gpu_cache_shape(num_blocks=num_blocks, block_size=16, num_kv_heads=1 if toy else 8, head_size=128)
    layers = [torch.randn(shape, device=report.device, dtype=torch.bfloat16) for _ in range(num_layers)]
    block_copy = BlockCopy(layers)
    for num_copies in (3,) if toy else (1, 16, 256):
        blocks = torch.randperm(num_blocks, device=report.device)[: 2 * num_copies].view(-1, 2)
        case = f"{num_copies} blocks of {num_layers} layers"
        block_copy(blocks)
        for layer in (layers[0], layers[-1]):
            report.check("block_copy", case, layer[blocks[:, 1]], layer[blocks[:, 0]], rtol=0, atol=0)
        num_bytes = 2 * num_copies * num_layers * layers[0][0].numel() * layers[0].element_size()
        measure(report, "block_copy", case, "triton", num_bytes, lambda blocks=blocks: block_copy(blocks))
