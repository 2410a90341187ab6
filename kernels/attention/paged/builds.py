"""The configurations of paged attention that are compiled ahead of time: head shapes of common models, and each of the
options once."""

from collections.abc import Mapping
from typing import Any

import torch

from kernels.attention.paged.triton_kernels import decode_kernel, prefill_kernel
from kernels.attention.triton_reduce import reduce_kernel
from kernels.attention.triton_schedule import (
    CHUNK,
    Tiles,
    decode_tiles,
    padded,
    prefill_tiles,
    schedule_constants,
    schedule_kernel,
)
from kernels.kv_cache.layout import HeadShape
from kernels.triton_common.kernel_build import ARCHS, FP8_ARCHS, KernelBuild

_LLAMA_8B = HeadShape(num_heads=32, num_kv_heads=8, head_size=128)
_LLAMA_1B = HeadShape(num_heads=32, num_kv_heads=8, head_size=64)
_LLAMA_4 = HeadShape(num_heads=40, num_kv_heads=8, head_size=128)
_GEMMA = HeadShape(num_heads=8, num_kv_heads=4, head_size=256)
_PHI = HeadShape(num_heads=32, num_kv_heads=32, head_size=96)
_STABLELM = HeadShape(num_heads=32, num_kv_heads=32, head_size=80)
_WIDE = HeadShape(num_heads=16, num_kv_heads=4, head_size=192)
_MQA = HeadShape(num_heads=48, num_kv_heads=1, head_size=128)
_BF16, _FP16, _E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
_TRITON_NAMES = {_BF16: "*bf16", _FP16: "*fp16", torch.float32: "*fp32", _E4M3: "*fp8e4nv"}

_STEP = {"query_starts": "*i32", "context_lens": "*i32", "starts": "*i32"}
_PARTIALS = {"partial_sums": "*fp32", "partial_values": "*fp32"}
_OPTIONAL = ("sinks", "k_scale", "v_scale")


def shipped() -> list[KernelBuild]:
    builds: list[KernelBuild] = []
    for arch in ARCHS:
        builds += _attention(arch, "llama-8b", _LLAMA_8B)
        builds += _attention(arch, "llama-8b-fp8", _LLAMA_8B, cache_dtype=_E4M3, given=("k_scale", "v_scale"))
        builds += _attention(arch, "llama-1b-block-128", _LLAMA_1B, block_size=128)
        builds += _attention(arch, "gemma-window-cap", _GEMMA, window=1024, soft_cap=50.0)
        builds += _attention(arch, "llama-4-chunks", _LLAMA_4, attention_chunk=8192)
        builds += _attention(arch, "phi", _PHI, dtype=_FP16, block_size=32)
        builds += _attention(arch, "stablelm", _STABLELM, block_size=8)
        builds += _attention(arch, "head-192-sinks", _WIDE, given=("sinks",), block_size=64)
        builds += _attention(arch, "mqa", _MQA)
        builds.append(_decode(arch, "llama-8b", _LLAMA_8B, batch_invariant=True))
        builds.append(_decode(arch, "gemma", _GEMMA, batch_invariant=True))
        builds.append(
            _decode(
                arch, "llama-8b-fp8", _LLAMA_8B, batch_invariant=True, cache_dtype=_E4M3, given=("k_scale", "v_scale")
            )
        )
    builds.append(
        KernelBuild(
            name="reduce",
            fn=reduce_kernel,
            signature={
                "out": "*bf16", "query_starts": "*i32", "starts": "*i32", **_PARTIALS, "num_rows": "i32",
                "out_stride": "i32", "line_stride": "i32",
            },
            constexprs={**_shape(_LLAMA_8B), "sinks": None, "v_scale": None},
            multiples_of_16=("out_stride",),
            num_warps=1,
            num_stages=4,
        )
    )  # fmt: skip
    numbers = ("line_stride", "num_rows", "num_programs", "num_partials")
    builds.append(
        KernelBuild(
            name="schedule",
            fn=schedule_kernel,
            signature={**_STEP, **dict.fromkeys(numbers, "i32")},
            constexprs=schedule_constants(
                _LLAMA_8B, 1024, 0, CHUNK, decode_tiles(_LLAMA_8B, _BF16, 90, batch_invariant=False),
                prefill_tiles(_LLAMA_8B, _BF16, 90, has_chunks=False),
            ),
            num_warps=4,
            num_stages=1,
        )
    )  # fmt: skip
    return builds


def _attention(arch: int, name: str, heads: HeadShape, **options: Any) -> list[KernelBuild]:
    return [_decode(arch, name, heads, **options), _prefill(arch, name, heads, **options)]


def _decode(
    arch: int,
    name: str,
    heads: HeadShape,
    *,
    batch_invariant: bool = False,
    cache_dtype: torch.dtype = _BF16,
    **options: Any,
) -> KernelBuild:
    tiles = decode_tiles(heads, cache_dtype, arch, batch_invariant=batch_invariant)
    kind = "invariant" if batch_invariant else "decode"
    return _build(
        arch, f"{kind}-{name}", decode_kernel, heads, tiles, _PARTIALS, {"CHUNK": CHUNK}, cache_dtype, **options
    )


def _prefill(
    arch: int, name: str, heads: HeadShape, *, cache_dtype: torch.dtype = _BF16, **options: Any
) -> KernelBuild:
    tiles = prefill_tiles(heads, cache_dtype, arch, has_chunks="attention_chunk" in options)
    return _build(arch, f"prefill-{name}", prefill_kernel, heads, tiles, {}, {}, cache_dtype, **options)


def _build(
    arch: int,
    name: str,
    kernel: Any,
    heads: HeadShape,
    tiles: Tiles,
    pointers: Mapping[str, str],
    constants: Mapping[str, Any],
    cache_dtype: torch.dtype,
    *,
    dtype: torch.dtype = _BF16,
    window: int = 0,
    attention_chunk: int = 0,
    soft_cap: float = 0.0,
    given: tuple[str, ...] = (),
    block_size: int = 16,
) -> KernelBuild:
    cache_name = _TRITON_NAMES[dtype if cache_dtype is _BF16 else cache_dtype]
    if cache_dtype is _E4M3 and arch not in FP8_ARCHS:
        cache_name = "*u8"
    return KernelBuild(
        name=f"{name}-sm{arch}",
        fn=kernel,
        signature={
            "q": _TRITON_NAMES[dtype], "cache": cache_name, "out": _TRITON_NAMES[dtype], **_STEP,
            "block_tables": "*i32", "table_rows": "*i32", **pointers, **dict.fromkeys(given, "*fp32"), "factor": "fp32",
            **dict.fromkeys(("num_rows", "q_stride", "out_stride", "table_stride", "line_stride"), "i32"),
        },
        constexprs={
            **_shape(heads), **dict.fromkeys(set(_OPTIONAL) - {*given}), "BLOCK_SIZE": block_size, "WINDOW": window,
            "ATTENTION_CHUNK": attention_chunk, "SOFT_CAP": soft_cap, "LANES": tiles.lanes, "TOKENS": tiles.tokens,
            **constants,
        },
        multiples_of_16=("q_stride", "out_stride"),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        expects_wgmma=arch == 90 and tiles.lanes >= 64,
        archs=(arch,),
    )  # fmt: skip


def _shape(heads: HeadShape) -> dict[str, Any]:
    return {
        "KV_HEADS": heads.num_kv_heads,
        "GROUP": heads.group_size,
        "D": heads.head_size,
        "D_PADDED": padded(heads.head_size),
        "SCALE_PER_HEAD": False,
    }
