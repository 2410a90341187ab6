"""The configurations of MLA that are compiled ahead of time: DeepSeek's sizes, with 128 heads and with the 16 of a rank
of 8."""

import torch

from kernels.attention.latent.triton import mla_decode_kernel
from kernels.attention.latent.triton_schedule import chunk_of, head_groups, mla_tiles
from kernels.kv_cache.layout import LatentShape
from kernels.triton_common.kernel_build import ARCHS, FP8_ARCHS, KernelBuild

_WHOLE, _RANK = LatentShape(num_heads=128), LatentShape(num_heads=16)
_BF16, _E4M3 = torch.bfloat16, torch.float8_e4m3fn


def shipped() -> list[KernelBuild]:
    builds = [_build(arch, "16-heads", _RANK) for arch in ARCHS]
    builds += [_build(arch, "16-heads-e4m3", _RANK, cache_dtype=_E4M3) for arch in ARCHS]
    builds += [
        _build(90, "128-heads", _WHOLE),
        _build(90, "16-heads-drafts", _RANK, queries_per_tile=4),
    ]
    return builds


def _build(
    arch: int,
    name: str,
    shape: LatentShape,
    *,
    cache_dtype: torch.dtype = _BF16,
    queries_per_tile: int = 1,
) -> KernelBuild:
    tiles = mla_tiles(shape, cache_dtype, arch, queries_per_tile=queries_per_tile)
    groups = head_groups(shape, tiles.lanes)
    is_e4m3 = cache_dtype is _E4M3
    numbers = ("num_rows", "q_stride", "out_stride", "table_stride", "line_stride")
    return KernelBuild(
        name=f"{name}-sm{arch}",
        fn=mla_decode_kernel,
        signature={
            "q": "*bf16", "cache": ("*fp8e4nv" if arch in FP8_ARCHS else "*u8") if is_e4m3 else "*bf16", "out": "*bf16",
            **dict.fromkeys(("query_starts", "context_lens", "block_tables", "table_rows", "starts"), "*i32"),
            **dict.fromkeys(("partial_sums", "partial_values", "own_values"), "*fp32"),
            **({"kv_scale": "*fp32"} if is_e4m3 else {}), "factor": "fp32", **dict.fromkeys(numbers, "i32"),
        },
        constexprs={
            **({} if is_e4m3 else {"kv_scale": None}),
            "HEAD_GROUPS": groups.num_kv_heads, "GROUP": groups.group_size, "LATENT": shape.latent_size,
            "ROPE": shape.rope_size, "BLOCK_SIZE": 16, "LANES": tiles.lanes, "TOKENS": tiles.tokens,
            "CHUNK": chunk_of(tiles.lanes),
        },
        multiples_of_16=("q_stride", "out_stride"),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        expects_wgmma=tiles.lanes == 64,
        expects_vectors=True,
        archs=(arch,),
    )  # fmt: skip
