"""Ahead-of-time builds of rope: Llama's heads with a row a token, and GPT-J's pairs in part of a head with a table."""

import torch

from kernels.elementwise.rope.triton import cos_sin_rows, rope_
from kernels.triton_common.kernel_build import KernelBuild
from kernels.triton_common.recording import bf16, float32, int32, recorded, tensor


def shipped() -> list[KernelBuild]:
    q, k = bf16(8, 32, 128), bf16(8, 8, 128)
    positions = tensor(torch.int64, 8)
    return [
        recorded("halves", lambda: rope_(q, k, float32(8, 128)), expects_vectors=True),
        recorded(
            "interleaved-part",
            lambda: rope_(q, k, float32(4096, 64), positions_T=positions, interleaved=True),
            expects_vectors=True,
        ),
        recorded("cos-sin-rows", lambda: cos_sin_rows(int32(8), float32(64))),
    ]
