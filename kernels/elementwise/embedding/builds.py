"""Ahead-of-time builds of embedding: Llama-3.1-8B's, into bf16 and into a float32 stream, and one whose rows are below
a tile."""

import torch

from kernels.elementwise.embedding.triton import embedding
from kernels.triton_common.kernel_build import KernelBuild
from kernels.triton_common.recording import bf16, float32, int32, recorded, tensor


def shipped() -> list[KernelBuild]:
    ids, table = tensor(torch.int64, 8), bf16(128256, 4096)
    return [
        recorded("bf16", lambda: embedding(ids, table), expects_vectors=True),
        recorded("bf16-stream", lambda: embedding(int32(8), table, out=float32(8, 4096)), expects_vectors=True),
        recorded("bf16-short", lambda: embedding(ids, bf16(49152, 576)), expects_vectors=True),
    ]
