"""Embedding gather, from the whole table and from a rank's part, beside PyTorch's."""

import torch
import torch.nn.functional as F

from benchmarks.gpu.ops._bandwidth import measure, num_bytes_of, token_counts
from benchmarks.gpu.report import Report
from kernels.elementwise.embedding import reference
from kernels.elementwise.embedding.triton import embedding


def run(report: Report, *, toy: bool) -> None:
    num_rows, size = (50, 300) if toy else (128256, 4096)
    table = torch.randn(num_rows, size, device=report.device, dtype=torch.bfloat16)
    part = num_rows // 2
    for num_tokens in token_counts(toy):
        case = f"{num_tokens} of {num_rows} x {size}"
        ids = torch.randint(num_rows, (num_tokens,), device=report.device)
        few = ids[:3]
        expected = reference.embedding(few.cpu(), table[:part].cpu())
        report.check("embedding", case, embedding(few, table[:part]), expected, rtol=0, atol=0)
        num_bytes = 2 * num_bytes_of(table[:1]) * num_tokens
        measure(report, "embedding", case, "whole", num_bytes, lambda ids=ids: embedding(ids, table))
        measure(report, "embedding", case, "torch", num_bytes, lambda ids=ids: F.embedding(ids, table))
