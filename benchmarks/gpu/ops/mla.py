"""MLA decodes as a share of a copy's bandwidth and in TFLOP/s, at DeepSeek-V3's sizes: the 16 heads of one of 8 ranks,
and all 128. Each entry counts once, however often it is read; blocks of 64 in random order."""

from dataclasses import dataclass

import torch

from benchmarks.gpu.ops._bandwidth import measure, num_bytes_of, token_counts
from benchmarks.gpu.report import Report
from kernels.attention.latent import reference
from kernels.attention.latent.triton import LatentShape, MlaSchedule, mla_attention
from kernels.kv_cache.latent_write.reference import mla_cache_write as write_by_token
from kernels.kv_cache.latent_write.triton import mla_cache_write
from kernels.kv_cache.layout import mla_cache_shape

OP = "mla_attention"
_BLOCK_SIZE = 64
_RANK, _WHOLE = LatentShape(num_heads=16), LatentShape(num_heads=128)
_TOY = LatentShape(num_heads=3, latent_size=64, rope_size=16)
_DECODES = [(batch, context) for context in (1 << 10, 4 << 10, 16 << 10, 64 << 10) for batch in (1, 8, 64, 256)]
_MAX_CACHE_BYTES = 20 << 30
# The scale for DeepSeek's expanded heads.
_SCALE = 192**-0.5
# bf16 rounds weights and results by 2^-9 each.
_TOLERANCE = 2e-2


@dataclass(frozen=True)
class Case:
    """`batch` rows of `queries` queries, the last of `context` tokens."""

    name: str
    shape: LatentShape
    batch: int
    context: int
    q_THE: torch.Tensor
    cache: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    schedule: MlaSchedule

    @classmethod
    def make(
        cls, shape: LatentShape, batch: int, queries: int, context: int, device: str, cache_dtype: torch.dtype
    ) -> "Case":
        generator = torch.Generator(device=device).manual_seed(0)
        num_blocks = -(-context // _BLOCK_SIZE)
        size = mla_cache_shape(num_blocks=batch * num_blocks + 1, block_size=_BLOCK_SIZE, shape=shape)
        cache = torch.empty(size, dtype=torch.bfloat16, device=device).normal_(generator=generator)
        order = torch.randperm(batch * num_blocks, generator=generator, device=device) + 1
        q_THE = torch.randn(batch * queries, shape.num_heads, shape.entry_size, generator=generator, device=device)
        kind = "e4m3" if cache_dtype is torch.float8_e4m3fn else "bf16"
        case = cls(
            name=f"{shape.num_heads} heads, {batch} x {context}, {queries} queries, {kind}",
            shape=shape,
            batch=batch,
            context=context,
            q_THE=q_THE.bfloat16(),
            cache=cache.to(cache_dtype),
            query_starts=(torch.arange(batch + 1) * queries).int().to(device),
            context_lens=torch.full((batch,), context).int().to(device),
            block_tables=order.view(batch, num_blocks).int(),
            schedule=MlaSchedule(
                shape,
                max_num_seqs=batch,
                max_context_len=context,
                cache_dtype=cache_dtype,
                device=device,
                queries_per_tile=queries,
            ),
        )
        case.schedule.update(case.query_starts, case.context_lens)
        return case

    @property
    def kv_scale(self) -> torch.Tensor | None:
        return self.q_THE.new_ones(1, dtype=torch.float32) if self.cache.dtype is torch.float8_e4m3fn else None

    @property
    def kv_bytes(self) -> int:
        return self.batch * self.context * self.shape.entry_size * self.cache.dtype.itemsize

    @property
    def flop(self) -> float:
        """Operations of both products, over the whole context of each query."""
        numbers = self.shape.entry_size + self.shape.latent_size
        return 2.0 * len(self.q_THE) * self.context * self.shape.num_heads * numbers

    def ours(self) -> torch.Tensor:
        return mla_attention(
            self.q_THE,
            self.cache,
            query_starts=self.query_starts,
            context_lens=self.context_lens,
            block_tables=self.block_tables,
            scale=_SCALE,
            schedule=self.schedule,
            kv_scale=self.kv_scale,
        )

    def entries(self) -> torch.Tensor:
        """The entries in the order of the context, [batch, 1, tokens, L + R]."""
        return self.cache[self.block_tables.long()].to(self.q_THE.dtype).flatten(1, 2)[:, None, : self.context]

    def expected(self) -> torch.Tensor:
        """The result by PyTorch on a GPU, since the reference would take hours there; otherwise by the reference."""
        if self.q_THE.is_cuda:
            return self.by_pytorch(self.entries().float())
        return reference.mla_attention(
            self.q_THE,
            self.cache,
            query_starts=self.query_starts.numpy(),
            context_lens=self.context_lens.numpy(),
            block_tables=self.block_tables.numpy(),
            scale=_SCALE,
            latent_size=self.shape.latent_size,
        )

    def by_pytorch(self, entries_B1CE: torch.Tensor) -> torch.Tensor:
        """The result of PyTorch's own ops, for rows of one query."""
        scores_BHC = (self.q_THE.to(entries_B1CE.dtype) @ entries_B1CE[:, 0].mT).float() * _SCALE
        weights_BHC = scores_BHC.softmax(-1).to(entries_B1CE.dtype)
        return weights_BHC @ entries_B1CE[:, 0, :, : self.shape.latent_size]


def run(report: Report, *, toy: bool) -> None:
    if toy:
        for shape in ((2, 1, 70), (1, 3, 33)):
            for cache_dtype in (torch.bfloat16, torch.float8_e4m3fn):
                _check(report, Case.make(_TOY, *shape, report.device, cache_dtype))
        case = Case.make(_TOY, 2, 1, 70, report.device, torch.bfloat16)
        report.check(
            OP, "toy, PyTorch", case.by_pytorch(case.entries()), case.expected(), rtol=_TOLERANCE, atol=_TOLERANCE
        )
        report.row(OP, case.name, "ours", report.milliseconds(case.ours))
    else:
        for shape in (_RANK, _WHOLE):
            for batch, context in ((3, 5_000), (300, 100)):
                for cache_dtype in (torch.bfloat16, torch.float8_e4m3fn):
                    _check(report, Case.make(shape, batch, 1, context, report.device, cache_dtype))
        for shape in (_RANK, _WHOLE):
            for batch, context in _DECODES:
                _time_decode(report, shape, batch, context, 1, torch.bfloat16)
            for batch, context in ((1, 64 << 10), (64, 4 << 10)):
                _time_decode(report, shape, batch, context, 1, torch.float8_e4m3fn)
            # Verification of three drafts.
            _time_decode(report, shape, 64, 4 << 10, 4, torch.bfloat16)
    for num_tokens in token_counts(toy):
        for cache_dtype in (torch.bfloat16, torch.float8_e4m3fn):
            _time_write(report, _TOY if toy else _RANK, num_tokens, cache_dtype)


def _check(report: Report, case: Case) -> None:
    report.check(OP, case.name, case.ours(), case.expected(), rtol=_TOLERANCE, atol=_TOLERANCE)


def _time_decode(
    report: Report, shape: LatentShape, batch: int, context: int, queries: int, cache_dtype: torch.dtype
) -> None:
    name = f"{shape.num_heads} heads, {batch} x {context}"
    num_bytes = 2 * batch * context * shape.entry_size
    if num_bytes > _MAX_CACHE_BYTES:
        report.skip(OP, name, f"{num_bytes >> 30} GiB of entries")
        return
    if not report.has_time(2.0):
        report.skip(OP, name, "no time left")
        return
    case = Case.make(shape, batch, queries, context, report.device, cache_dtype)
    ways = {"ours": case.ours}
    if cache_dtype is torch.bfloat16 and queries == 1:
        entries = case.entries()
        ways["PyTorch, cont."] = lambda: case.by_pytorch(entries)
    for way, call in ways.items():
        milliseconds = report.milliseconds(call)
        share = report.share_of_copy(case.kv_bytes, milliseconds)
        report.row(OP, case.name, way, milliseconds, share_of_copy=share, tflops=case.flop / milliseconds / 1e9)


def _time_write(report: Report, shape: LatentShape, num_tokens: int, dtype: torch.dtype) -> None:
    case = f"{num_tokens} x {shape.entry_size} {'bf16' if dtype is torch.bfloat16 else 'e4m3'}"
    num_blocks = num_tokens // _BLOCK_SIZE * 2 + 4
    size = mla_cache_shape(num_blocks=num_blocks, block_size=_BLOCK_SIZE, shape=shape)
    cache = torch.zeros(size, device=report.device).to(dtype)
    entries = torch.randn(num_tokens, shape.entry_size, device=report.device).bfloat16()
    latent, rope = entries.split([shape.latent_size, shape.rope_size], dim=1)
    slots = torch.randperm(num_blocks * _BLOCK_SIZE, device=report.device)[:num_tokens]
    scale = None if dtype is torch.bfloat16 else torch.full((1,), 0.02, device=report.device)

    expected, few = cache.cpu(), slots[:3].cpu()
    write_by_token(latent[:3].cpu(), rope[:3].cpu(), expected, few, None if scale is None else scale.cpu())
    mla_cache_write(latent, rope, cache, slots[:3], kv_scale=scale)
    report.check("mla_cache_write", case, cache.cpu().float(), expected.float(), rtol=0, atol=0)
    num_bytes = num_bytes_of(entries) + entries.numel() * cache.element_size()
    measure(
        report,
        "mla_cache_write",
        case,
        "triton",
        num_bytes,
        lambda: mla_cache_write(latent, rope, cache, slots, kv_scale=scale),
    )
