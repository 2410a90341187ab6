"""The configurations of MLA that are compiled ahead of time: DeepSeek's sizes, with all 128 heads and with the 16 heads
of one rank of 8."""

from dataclasses import replace

import torch

from kernels.attention.latent.triton import LatentShape, MlaSchedule, mla_attention, mla_decode_kernel
from kernels.kv_cache.layout import mla_cache_shape
from kernels.triton_common.kernel_build import ARCHS, KernelBuild
from kernels.triton_common.recording import bf16, float32, int32, recorded, tensor

_WHOLE, _RANK = LatentShape(num_heads=128), LatentShape(num_heads=16)


def shipped() -> list[KernelBuild]:
    return [
        *(_build(arch, "16-heads", _RANK) for arch in ARCHS),
        *(_build(arch, "16-heads-e4m3", _RANK, is_e4m3=True) for arch in ARCHS),
        *(_build(arch, "128-heads", _WHOLE) for arch in (90, 100)),
        *(_build(arch, "16-heads-drafts", _RANK, queries_per_tile=4) for arch in (90, 100)),
    ]


def _build(
    arch: int, name: str, shape: LatentShape, *, is_e4m3: bool = False, queries_per_tile: int = 1
) -> KernelBuild:
    num_rows, max_num_seqs = 5, 257
    cache_dtype = torch.float8_e4m3fn if is_e4m3 else torch.bfloat16

    def step() -> None:
        schedule = MlaSchedule(
            shape,
            max_num_seqs=max_num_seqs,
            max_context_len=1 << 17,
            cache_dtype=cache_dtype,
            device="meta",
            queries_per_tile=queries_per_tile,
        )
        mla_attention(
            bf16(num_rows, shape.num_heads, shape.entry_size),
            tensor(cache_dtype, *mla_cache_shape(num_blocks=64, block_size=16, shape=shape)),
            query_starts=int32(num_rows + 1),
            context_lens=int32(num_rows),
            block_tables=int32(max_num_seqs, 2049),
            table_rows=int32(num_rows),
            scale=0.07,
            schedule=schedule,
            kv_scale=float32(1) if is_e4m3 else None,
        )

    build = recorded(f"{name}-sm{arch}", step, kernel=mla_decode_kernel, archs=(arch,), expects_vectors=True)
    return replace(build, expects_wgmma=arch == 90 and build.constexprs["LANES"] == 64)
