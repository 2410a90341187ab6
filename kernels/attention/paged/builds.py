"""The configurations of paged attention that are compiled ahead of time: head shapes of common models, and each option
once."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from kernels.attention.paged.triton import AttentionSchedule, paged_attention
from kernels.attention.paged.triton_kernels import decode_kernel, prefill_kernel
from kernels.attention.triton_reduce import reduce_kernel
from kernels.attention.triton_schedule import schedule_kernel
from kernels.kv_cache.layout import HeadShape, gpu_cache_shape
from kernels.triton_common.kernel_build import ARCHS, KernelBuild
from kernels.triton_common.recording import float32, int32, recorded, tensor

_LLAMA_8B = HeadShape(num_heads=32, num_kv_heads=8, head_size=128)
_LLAMA_1B = HeadShape(num_heads=32, num_kv_heads=8, head_size=64)
_LLAMA_4 = HeadShape(num_heads=40, num_kv_heads=8, head_size=128)
_GEMMA = HeadShape(num_heads=8, num_kv_heads=4, head_size=256)
_PHI = HeadShape(num_heads=32, num_kv_heads=32, head_size=96)
_STABLELM = HeadShape(num_heads=32, num_kv_heads=32, head_size=80)
_WIDE = HeadShape(num_heads=16, num_kv_heads=4, head_size=192)
_MQA = HeadShape(num_heads=48, num_kv_heads=1, head_size=128)
_E4M3: dict[str, Any] = {"cache_dtype": torch.float8_e4m3fn, "k_scale": float32(1), "v_scale": float32(1)}


def shipped() -> list[KernelBuild]:
    builds: list[KernelBuild] = []
    for arch in ARCHS:
        builds += _attention(arch, "llama-8b", _LLAMA_8B)
        builds += _attention(arch, "llama-8b-fp8", _LLAMA_8B, **_E4M3)
        builds += _attention(arch, "llama-1b-block-128", _LLAMA_1B, block_size=128)
        builds += _attention(arch, "gemma-window-cap", _GEMMA, window=1024, soft_cap=50.0)
        builds += _attention(arch, "llama-4-chunks", _LLAMA_4, attention_chunk=8192)
        builds += _attention(arch, "phi", _PHI, dtype=torch.float16, block_size=32)
        builds += _attention(arch, "stablelm", _STABLELM, block_size=8)
        builds += _attention(arch, "head-192-sinks", _WIDE, sinks=float32(16), block_size=64)
        builds += _attention(arch, "mqa", _MQA)
        for name, heads, options in (
            ("llama-8b", _LLAMA_8B, {}),
            ("gemma", _GEMMA, {}),
            ("llama-8b-fp8", _LLAMA_8B, _E4M3),
        ):
            builds.append(_build(arch, "invariant", name, decode_kernel, _step(heads, batch_invariant=True, **options)))
        for name, options in (("llama-8b", {}), ("llama-8b-fp8", _E4M3)):
            drafting = _step(_LLAMA_8B, most_queries=9, **options)
            builds.append(_build(arch, "drafts", name, decode_kernel, drafting))
    step = _step(_LLAMA_8B)
    builds.append(recorded("reduce", step, kernel=reduce_kernel))
    builds.append(recorded("schedule", _step(_LLAMA_8B, window=1024), kernel=schedule_kernel))
    return builds


def by_numbers() -> KernelBuild:
    """The decode that reads an e4m3 cache number by number. It does not ship: benchmarks time it beside pairs."""
    return _build(90, "decode", "llama-8b-fp8-by-numbers", decode_kernel, _step(_LLAMA_8B, pairs=False, **_E4M3))


def _attention(arch: int, name: str, heads: HeadShape, **options: Any) -> list[KernelBuild]:
    step = _step(heads, **options)
    kernels = (("decode", decode_kernel), ("prefill", prefill_kernel))
    return [_build(arch, kind, name, kernel, step) for kind, kernel in kernels]


def _build(arch: int, kind: str, name: str, kernel: Any, step: Callable[[], None]) -> KernelBuild:
    build = recorded(f"{kind}-{name}-sm{arch}", step, kernel=kernel, archs=(arch,))
    return replace(build, expects_wgmma=arch == 90 and build.constexprs["LANES"] >= 64)


def _step(
    heads: HeadShape,
    *,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    block_size: int = 16,
    window: int = 0,
    attention_chunk: int = 0,
    batch_invariant: bool = False,
    most_queries: int = 1,
    pairs: bool = True,
    **layer: Any,
) -> Callable[[], None]:
    """A step of five rows, with a prompt among them."""
    num_rows, num_tokens, max_num_seqs = 5, 200, 257
    query_starts, context_lens = int32(num_rows + 1), int32(num_rows)

    def run() -> None:
        schedule = AttentionSchedule(
            heads,
            max_num_seqs=max_num_seqs,
            max_context_len=1 << 17,
            cache_dtype=cache_dtype or dtype,
            device="meta",
            window=window,
            attention_chunk=attention_chunk,
            batch_invariant=batch_invariant,
            most_queries=most_queries,
            pairs=pairs,
        )
        schedule.update(query_starts, context_lens)
        cache = gpu_cache_shape(
            num_blocks=64, block_size=block_size, num_kv_heads=heads.num_kv_heads, head_size=heads.head_size
        )
        paged_attention(
            tensor(dtype, num_tokens, heads.num_heads, heads.head_size),
            tensor(cache_dtype or dtype, *cache),
            query_starts=query_starts,
            context_lens=context_lens,
            block_tables=int32(max_num_seqs, 2049),
            table_rows=int32(num_rows),
            scale=heads.head_size**-0.5,
            schedule=schedule,
            **layer,
        )

    return run
