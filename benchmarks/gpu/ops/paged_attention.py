"""Paged attention: decodes as a share of a copy's bandwidth, prefills in TFLOP/s, beside peers that can be imported.

Head shape of Llama-3.1-8B (32 heads on 8 KV heads of 128), bf16, blocks of 16 in random order.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from benchmarks.gpu.report import Report
from kernels.attention.paged import reference
from kernels.attention.paged.triton import AttentionSchedule, paged_attention
from kernels.attention.triton_schedule import Tiles
from kernels.kv_cache.layout import HeadShape, gpu_cache_shape

OP = "paged_attention"
LLAMA_8B = HeadShape(num_heads=32, num_kv_heads=8, head_size=128)
TOY = HeadShape(num_heads=4, num_kv_heads=2, head_size=64)
_BLOCK_SIZE = 16
_CONTEXTS = (1 << 10, 4 << 10, 16 << 10, 64 << 10, 128 << 10)
_DECODES = [(batch, context) for context in _CONTEXTS for batch in (1, 8, 64, 256)]
_PREFILLS = [(8, 1 << 10), (2, 4 << 10), (1, 16 << 10)]
# Ways to decode from an e4m3 cache: tiles, and whether it is read by pairs or number by number. The first ships; number
# by number, 64 tokens were the fastest of 12 tiles on an H200, and 128 what shipped then.
E4M3_DECODES = {
    "pairs, 128 tokens": (Tiles(lanes=16, tokens=128, num_warps=4, num_stages=7, programs_per_sm=2), True),
    "pairs, 64 tokens": (Tiles(lanes=16, tokens=64, num_warps=4, num_stages=5, programs_per_sm=2), True),
    "numbers, 64 tokens": (Tiles(lanes=16, tokens=64, num_warps=4, num_stages=5, programs_per_sm=2), False),
    "numbers, 128 tokens": (Tiles(lanes=16, tokens=128, num_warps=4, num_stages=7, programs_per_sm=2), False),
}
# The largest cache: a contiguous copy for SDPA must fit beside it.
_MAX_CACHE_BYTES = 40 << 30
# bf16 rounds weights and results by 2^-9 each.
_TOLERANCE = 2e-2


@dataclass(frozen=True)
class Case:
    """`batch` rows of `queries` queries, the last of `context` tokens."""

    name: str
    heads: HeadShape
    batch: int
    queries: int
    context: int
    q_THD: torch.Tensor
    cache: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    schedule: AttentionSchedule

    @classmethod
    def make(
        cls, heads: HeadShape, batch: int, queries: int, context: int, device: str, cache_dtype: torch.dtype
    ) -> "Case":
        generator = torch.Generator(device=device).manual_seed(0)
        num_blocks = -(-context // _BLOCK_SIZE)
        shape = gpu_cache_shape(
            num_blocks=batch * num_blocks + 1,
            block_size=_BLOCK_SIZE,
            num_kv_heads=heads.num_kv_heads,
            head_size=heads.head_size,
        )
        cache = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=generator)
        order = torch.randperm(batch * num_blocks, generator=generator, device=device) + 1
        query_starts, context_lens = torch.arange(batch + 1) * queries, torch.full((batch,), context)
        kind = "prefill" if queries > 1 else "decode"
        suffix = ", e4m3 cache" if cache_dtype is torch.float8_e4m3fn else ""
        case = cls(
            name=f"{kind}, {batch} x {context}{suffix}",
            heads=heads,
            batch=batch,
            queries=queries,
            context=context,
            q_THD=torch.randn(
                batch * queries, heads.num_heads, heads.head_size, generator=generator, device=device
            ).bfloat16(),
            cache=cache.to(cache_dtype),
            query_starts=query_starts.int().to(device),
            context_lens=context_lens.int().to(device),
            block_tables=order.view(batch, num_blocks).int(),
            schedule=AttentionSchedule(
                heads, max_num_seqs=batch, max_context_len=context, cache_dtype=cache_dtype, device=device
            ),
        )
        case.schedule.update(case.query_starts, case.context_lens)
        return case

    @property
    def scale(self) -> float:
        return self.heads.head_size**-0.5

    @property
    def kv_bytes(self) -> int:
        tokens = self.batch * self.context
        return 2 * tokens * self.heads.num_kv_heads * self.heads.head_size * self.cache.dtype.itemsize

    @property
    def flop(self) -> float:
        """Operations of both products, below the diagonal."""
        pairs = self.queries * self.context - self.queries * (self.queries - 1) / 2
        return 4.0 * self.batch * pairs * self.heads.num_heads * self.heads.head_size

    def ours(self) -> torch.Tensor:
        one = self.q_THD.new_ones(1, dtype=torch.float32) if self.cache.dtype is torch.float8_e4m3fn else None
        return paged_attention(
            self.q_THD,
            self.cache,
            query_starts=self.query_starts,
            context_lens=self.context_lens,
            block_tables=self.block_tables,
            scale=self.scale,
            schedule=self.schedule,
            max_query_len=self.queries,
            k_scale=one,
            v_scale=one,
        )

    def contiguous(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v as SDPA takes them, [batch, heads, tokens, head size]."""
        kv = self.cache[self.block_tables.long()].to(self.q_THD.dtype)  # [batch, blocks, 2, K, B, D]
        k, v = kv.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[:, :, :, : self.context].contiguous()
        q = self.q_THD.unflatten(0, (self.batch, self.queries)).transpose(1, 2).contiguous()
        return q, k, v

    def expected(self) -> torch.Tensor:
        """The result by SDPA on a GPU, since the reference would take hours there; otherwise by the reference."""
        if self.q_THD.is_cuda:
            q, k, v = self.contiguous()
            return _sdpa(q.float(), k.float(), v.float(), self.queries > 1).transpose(1, 2).flatten(0, 1)
        return reference.paged_attention(
            self.q_THD,
            self.cache.permute(0, 3, 1, 2, 4),
            query_starts=self.query_starts.numpy(),
            context_lens=self.context_lens.numpy(),
            block_tables=np.asarray(self.block_tables),
            scale=self.scale,
        )


def run(report: Report, *, toy: bool) -> None:
    if toy:
        for shape in ((2, 1, 70), (1, 33, 33)):
            for cache_dtype in (torch.bfloat16, torch.float8_e4m3fn):
                _check(report, Case.make(TOY, *shape, report.device, cache_dtype))
        case = Case.make(TOY, 1, 33, 33, report.device, torch.bfloat16)
        q, k, v = case.contiguous()
        report.check(
            OP,
            "toy, SDPA",
            _sdpa(q, k, v, causal=True).transpose(1, 2).flatten(0, 1),
            case.expected(),
            rtol=_TOLERANCE,
            atol=_TOLERANCE,
        )
        report.row(OP, case.name, "ours", report.milliseconds(case.ours))
        return
    for shape in ((3, 1, 5_000), (300, 1, 100), (2, 700, 700)):
        for cache_dtype in (torch.bfloat16, torch.float8_e4m3fn):
            _check(report, Case.make(LLAMA_8B, *shape, report.device, cache_dtype))
    for batch, context in _DECODES:
        _time_decode(report, batch, context, torch.bfloat16)
    for batch, context in ((1, 128 << 10), (64, 4 << 10), (256, 4 << 10)):
        _time_decode(report, batch, context, torch.float8_e4m3fn)
    for batch, context in ((8, 4 << 10), (64, 4 << 10), (256, 512), (256, 1 << 10)):
        _compare_e4m3_decodes(report, batch, context)
    for batch, context in _PREFILLS:
        _time_prefill(report, batch, context)


def _compare_e4m3_decodes(report: Report, batch: int, context: int) -> None:
    """Both forms of decodes from an e4m3 cache, each with both tiles."""
    if not report.has_time(4.0):
        report.skip(OP, f"e4m3 decodes, {batch} x {context}", "no time left")
        return
    case = Case.make(LLAMA_8B, batch, 1, context, report.device, torch.float8_e4m3fn)
    expected = case.ours()
    for name, (tiles, pairs) in E4M3_DECODES.items():
        schedule = AttentionSchedule(
            LLAMA_8B,
            max_num_seqs=batch,
            max_context_len=context,
            cache_dtype=torch.float8_e4m3fn,
            device=report.device,
            tiles=tiles,
            pairs=pairs,
        )
        schedule.update(case.query_starts, case.context_lens)
        variant = replace(case, schedule=schedule)
        report.check(OP, f"{case.name}, {name}", variant.ours(), expected, rtol=_TOLERANCE, atol=_TOLERANCE)
        milliseconds = report.milliseconds(variant.ours)
        share = report.share_of_copy(case.kv_bytes, milliseconds)
        report.row(OP, case.name, name, milliseconds, share_of_copy=share)


def _check(report: Report, case: Case) -> None:
    report.check(OP, case.name, case.ours(), case.expected(), rtol=_TOLERANCE, atol=_TOLERANCE)


def _time_decode(report: Report, batch: int, context: int, cache_dtype: torch.dtype) -> None:
    name = f"decode, {batch} x {context}"
    num_bytes = 4 * batch * context * LLAMA_8B.num_kv_heads * LLAMA_8B.head_size
    if num_bytes > _MAX_CACHE_BYTES:
        report.skip(OP, name, f"{num_bytes >> 30} GiB of KV")
        return
    if not report.has_time(2.0):
        report.skip(OP, name, "no time left")
        return
    case = Case.make(LLAMA_8B, batch, 1, context, report.device, cache_dtype)
    _rows(report, case, {"ours": case.ours, **dict(_peers(case))})


def _time_prefill(report: Report, batch: int, context: int) -> None:
    if not report.has_time(4.0):
        report.skip(OP, f"prefill, {batch} x {context}", "no time left")
        return
    case = Case.make(LLAMA_8B, batch, context, context, report.device, torch.bfloat16)
    ways: dict[str, Callable[[], object]] = {"ours": case.ours, **dict(_peers(case))}
    # FlexAttention's first call compiles.
    if report.has_time(30.0):
        ways["FlexAttention"] = _flex_attention(case)
    _rows(report, case, ways)


def _rows(report: Report, case: Case, ways: dict[str, Callable[[], object]]) -> None:
    for way, call in ways.items():
        milliseconds = report.milliseconds(call)
        if case.queries > 1:
            report.row(OP, case.name, way, milliseconds, tflops=case.flop / milliseconds / 1e9)
        else:
            report.row(
                OP,
                case.name,
                way,
                milliseconds,
                share_of_copy=report.share_of_copy(case.kv_bytes, milliseconds),
                share_of_reads=report.share_of_reads(case.kv_bytes, milliseconds),
                kv_gb=case.kv_bytes / 1e9,
            )


def _peers(case: Case) -> Iterator[tuple[str, Callable[[], object]]]:
    if case.cache.dtype is not torch.bfloat16:
        return
    q, k, v = case.contiguous()
    yield "SDPA, contiguous", lambda: _sdpa(q, k, v, case.queries > 1)
    try:
        from flash_attn import flash_attn_func  # pyright: ignore[reportMissingImports]
    except ImportError:
        pass
    else:
        q_BTHD, k_BTKD, v_BTKD = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        yield "flash-attn, cont.", lambda: flash_attn_func(q_BTHD, k_BTKD, v_BTKD, causal=True)
    try:
        import flashinfer  # pyright: ignore[reportMissingImports]
    except ImportError:
        pass
    else:
        if case.queries == 1:
            yield "flashinfer", _flashinfer_decode(flashinfer, case)


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def _flex_attention(case: Case) -> Callable[[], object]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = case.contiguous()
    mask = create_block_mask(
        lambda _batch, _head, query, key: query >= key, None, None, case.queries, case.context, device=q.device
    )
    compiled = torch.compile(flex_attention)
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True)


def _flashinfer_decode(flashinfer: object, case: Case) -> Callable[[], object]:
    """flashinfer's decode on our cache, which has the same order of dims ("HND")."""
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=case.q_THD.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(  # pyright: ignore[reportAttributeAccessIssue]
        workspace, "HND", use_tensor_cores=True
    )
    num_blocks = case.block_tables.shape[1]
    starts = torch.arange(case.batch + 1, dtype=torch.int32, device=case.q_THD.device) * num_blocks
    last = torch.full_like(case.context_lens, (case.context - 1) % _BLOCK_SIZE + 1)
    heads = case.heads
    wrapper.plan(
        starts,
        case.block_tables.flatten(),
        last,
        heads.num_heads,
        heads.num_kv_heads,
        heads.head_size,
        _BLOCK_SIZE,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    return lambda: wrapper.run(case.q_THD, case.cache)
